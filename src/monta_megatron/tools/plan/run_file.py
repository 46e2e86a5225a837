"""`monta plan --out run.yaml`: a run file of the planned model, cluster, layout and flags.

The training's arguments are values to begin with, to be changed; `monta launch` takes the file.
"""

import math
import re
from pathlib import Path
from typing import Any

import yaml

from monta_megatron.common import presets
from monta_megatron.common.files import write_whole
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.models.files import is_run_file
from monta_megatron.planner.models.model import BATCH
from monta_megatron.planner.plan import Plan
from monta_megatron.tools.plan.request import PlanInputs, PlanRequest

# Megatron's arguments of a training, which no plan can know.
EXCHANGE = {"moe-grouped-gemm": True, "moe-permute-fusion": True, "use-distributed-optimizer": True}
TRAINING = {
    "train-iters": 1000,
    "lr": 1.0e-4,
    "min-lr": 1.0e-5,
    "lr-decay-style": "cosine",
    "clip-grad": 1.0,
}
DATA = {"mock-data": True, "split": "99,1,0", "tokenizer-type": "NullTokenizer", "num-workers": 2}
CHECKPOINTS = {
    "save": "${RUN_DIRECTORY}/checkpoints",
    "load": "${RUN_DIRECTORY}/checkpoints",
    "save-interval": 500,
    "exit-signal-handler": True,
    "eval-iters": 0,
    "eval-interval": 1000,
    "log-interval": 1,
}


def write_run(path: Path, request: PlanRequest, inputs: PlanInputs, plan: Plan) -> None:
    """Write the run file of a plan.

    Args:
        path: where to.
        request: names the files of the model and the cluster.
        inputs: what was read of them, and the layout.
        plan: the choice.

    Raises:
        ValueError: the model or the cluster has no file, the ranks do not fill nodes, or the file
            cannot be written.
    """
    layout, cluster, model = inputs.layout, inputs.cluster, inputs.model
    if not isinstance(request.model, str) or not isinstance(request.cluster, str):
        raise ValueError("--out: given, must be with --model FILE and --cluster FILE")
    if is_run_file(request.model):
        raise ValueError(
            f"--model: got {request.model}, a run file, must be a model file or a preset with --out"
        )
    on_host = min(cluster.ranks_per_host or cluster.ranks_per_node, layout.world_size)
    if layout.world_size % on_host:
        raise ValueError(
            f"--out: {layout.world_size} ranks, must be whole hosts of {on_host} for a run file"
        )
    step = model.micro_batch_size * layout.dp
    batch = request.global_batch_size or step * layout.pp * 4
    exchange: dict[str, Any] = {
        "moe-monta-chain": plan.chain,
        "moe-monta-num-chunks": plan.num_chunks,
        **({} if request.kernels == "auto" else {"moe-monta-kernels": request.kernels}),
        **_ranks_per_node(request.cluster, on_host, cluster.ranks_per_node),
        **EXCHANGE,
        **({"sequence-parallel": True} if layout.tp > 1 else {}),
        **_uneven_stages(model.num_layers, layout.pp),
    }
    given = {
        name: getattr(request, name.replace("-", "_"))
        for name in BATCH
        if getattr(request, name.replace("-", "_")) is not None
    }
    sections: list[tuple[str, dict[str, Any]]] = [
        ("Exchange and parallelism, as planned", exchange),
        ("Training: to be filled in", {**given, "global-batch-size": batch, **TRAINING}),
        ("Data: random tokens, until a data path and a tokenizer are named", DATA),
        ("Checkpoints and logs", CHECKPOINTS),
    ]
    head = {
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "_", model.name),
        "model": _place("models", request.model),
        "cluster": _place("clusters", request.cluster),
        "layout": {
            "nodes": layout.world_size // on_host,
            "ranks_per_node": on_host,
            **{name: getattr(layout, name) for name in ("tp", "ep", "etp", "pp", "cp")},
        },
        "environment": {
            # Megatron demands it before Blackwell.
            **({"CUDA_DEVICE_MAX_CONNECTIONS": 1} if layout.tp * layout.cp > 1 else {}),
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        },
        "slurm": {"options": {"gpus-per-node": on_host, "exclusive": True, "mem": 0}},
    }
    lines = [f"# Written by `monta plan --out`: {plan.reason}.", _yaml(head).rstrip(), "megatron:"]
    for title, arguments in sections:
        of_model = {name: model.arguments.get(name) for name in arguments}
        left = {name: value for name, value in arguments.items() if of_model[name] != value}
        if left:
            lines += [f"  # {title}", *(f"  {line}" for line in _yaml(left).splitlines())]
    write_whole(path, "\n".join(lines) + "\n")


def _ranks_per_node(cluster: str, on_host: int, planned: int) -> dict[str, int]:
    """What says that the job uses a part of nodes that are made up of hosts."""
    of_hosts = load_cluster(cluster).of_job(on_host).ranks_per_node
    return {} if of_hosts == planned else {"moe-monta-ranks-per-node": planned}


def _uneven_stages(num_layers: int, pp: int) -> dict[str, int]:
    """Layers of the last stage where stages cannot be even: 61 on 16 stages are 15 x 4 and 1."""
    if num_layers % pp == 0:
        return {}
    of_stage = math.ceil(num_layers / pp)
    if num_layers <= of_stage * (pp - 1):
        of_stage = num_layers // pp
    return {"decoder-last-pipeline-num-layers": num_layers - of_stage * (pp - 1)}


def _place(kind: presets.PresetKind, given: str) -> str:
    """A preset by its name; another file by its whole path."""
    found = presets.find(kind, given)
    if found.parent == presets.FOLDER / kind:
        return found.stem
    return str(found.absolute())


def _yaml(data: dict[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False, width=100)
