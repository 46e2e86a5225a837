"""`monta plan --out run.yaml`: a run file of the planned model, cluster, layout and flags."""

import re
from pathlib import Path

import yaml

from monta_megatron.common import files
from monta_megatron.common.files import write_whole
from monta_megatron.common.rules import require
from monta_megatron.planner.layout import uneven_stages
from monta_megatron.tools.plan.request import Planned, PlanRequest

# Arguments of a training that no plan can know.
TO_FILL_IN = """\
  # To be filled in; tokens are random until a data path and a tokenizer are named
  train-iters: 1000
  lr: 1.0e-4
  mock-data: true
  tokenizer-type: NullTokenizer
  eval-iters: 0
  log-interval: 1
"""


def write_run(path: Path, request: PlanRequest, planned: Planned) -> None:
    """Write the run file of a plan.

    Raises:
        ValueError: the ranks do not fill hosts, or the file cannot be written.
    """
    layout, cluster, plan = planned.layout, planned.cluster, planned.plan
    on_host = min(cluster.ranks_per_host or cluster.ranks_per_node, layout.world_size)
    rule = f"be whole hosts of {on_host} for a run file"
    require(layout.world_size % on_host == 0, "world_size", layout.world_size, rule)
    default_batch = 4 * layout.pp * planned.model.micro_batch_size * layout.dp
    megatron = {
        "moe-monta-chain": plan.chain,
        "moe-monta-num-chunks": plan.num_chunks,
        "moe-monta-ranks-per-node": request.ranks_per_node and cluster.ranks_per_node,
        "sequence-parallel": layout.tp > 1,
        "seq-length": request.seq_length,
        "micro-batch-size": request.micro_batch_size,
        "global-batch-size": request.global_batch_size or default_batch,
        **(uneven_stages(planned.model, layout.pp) or {}),
        "moe-grouped-gemm": True,
        "moe-permute-fusion": True,
        "use-distributed-optimizer": True,
    }
    data = {
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "_", planned.model.name),
        "model": _place("models", request.model),
        "cluster": _place("clusters", request.cluster),
        "layout": {
            "nodes": layout.world_size // on_host,
            "ranks_per_node": on_host,
            **{name: getattr(layout, name) for name in ("tp", "ep", "etp", "pp", "cp")},
        },
        # Megatron demands it before Blackwell.
        "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": 1} if layout.tp * layout.cp > 1 else {},
        "slurm": {"options": {"gpus-per-node": on_host}},
        "megatron": {name: value for name, value in megatron.items() if value},
    }
    text = yaml.safe_dump(data, sort_keys=False, width=100)
    write_whole(path, f"# Written by `monta plan --out`: {plan.reason}.\n{text}{TO_FILL_IN}")


def _place(kind: files.ConfigKind, given: str) -> str:
    """A preset by its name; another file by its whole path."""
    found = files.find_config(kind, given)
    return found.stem if found.parent == files.CONFIGS / kind else str(found.absolute())
