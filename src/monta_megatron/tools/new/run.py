"""Model and run files: from sizes, a preset or a config.json, with Megatron's arguments."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from monta_megatron.common import strict_yaml
from monta_megatron.common.flags import torch_name
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.models.files import ASSUMED, SEQ_LENGTH, load_model
from monta_megatron.planner.models.model import Model
from monta_megatron.tools.launch.run_config import RunConfig
from monta_megatron.tools.new.hardware import NetworkEnvironment
from monta_megatron.tools.new.template import Template, flags_of, make_template
from monta_megatron.tools.plan.request import PlanRequest, priced_cluster, read_inputs

# Where a size is not given, another one is taken: the key, the key of the other, and why.
TAKEN = (
    ("num_moe_layers", "num_layers", "taken: experts in every layer"),
    ("num_query_groups", "num_attention_heads", "taken: as many as query heads"),
)
ASSUMPTION = "assumed: write what the training has"


def model_template(given: Mapping[str, Any], source: str | None = None) -> Template:
    """The template of a model file.

    Args:
        given: fields of `Model` that the user gives; they win.
        source: a config.json, its folder, a model file or a preset to begin with; None for none.

    Raises:
        ValueError: the source cannot be read, or the sizes do not go together.
    """
    remarks: dict[str, str] = {}
    if source is None:
        values: dict[str, Any] = {"name": "own model", "source": "monta new model"}
        values |= {"seq_length": SEQ_LENGTH, **ASSUMED}
        assumed = ["seq_length", *ASSUMED]
    else:
        model = load_model(source)
        values = {name: value for name, value in strict_yaml.plain(model).items() if value}
        assumed = list(model.assumed)
    values |= given
    remarks |= {name: ASSUMPTION for name in assumed if name not in given}
    for name, other, why in TAKEN:
        if name not in values and other in values:
            values[name] = values[other]
            remarks[name] = why
    values.pop("assumed", None)
    return make_template(
        Model,
        values,
        about=["A model, for `monta plan --model` and for the run files of `monta launch`."],
        remarks=remarks,
        flags=flags_of(given),
        left_out=("assumed",),
    )


# Micro-batches of each rank in an iteration, for every pipeline stage: enough to fill them.
MICRO_BATCHES_PER_STAGE = 4
# Of a job, which is requeued where it saves checkpoints.
TIME_LIMIT_MINUTES = 240
# Other options of sbatch that clusters ask for.
SBATCH_OPTIONS = {
    "qos": "quality of service, by its name",
    "reservation": "nodes that are kept for you, by the name of the reservation",
    "constraint": "features of the nodes, such as the name of a GPU",
    "exclude": "nodes that are not taken; `nodelist` for those that are",
    "gres": "gpu:TYPE:N in place of gpus-per-node, where the cluster counts GPUs by their type",
    "cpus-per-task": "cores of a node, whose ranks are one task",
    "switches": "N@TIME: at most N leaf switches, and how long to wait for them",
    "segment": "how many nodes have to lie in one block, as on racks of NVL72",
    "dependency": "afterok:JOB, to start behind another job",
    "mail-type": "END,FAIL; to `mail-user`",
}
COMMON = {
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
}
BALANCE = {"moe-router-load-balancing-type": "aux_loss", "moe-aux-loss-coeff": 1.0e-2}
NOT_EXPRESSED = "not expressed by Megatron's arguments: {}"
# Of a model file that has sizes only.
COMPARE = (
    "The model file has sizes only and the rest is a common choice, so compare it with the model: "
    "position embedding, normalization, latent attention, which layers are dense, dense and "
    "shared feed-forward sizes, router scores, vocabulary."
)


def run_template(
    request: PlanRequest,
    *,
    nodes: int,
    ranks_per_node: int | None,
    name: str | None,
    folder: Path,
    network: NetworkEnvironment | None = None,
) -> Template:
    """The template of a run file.

    Args:
        request: files or presets, and sizes; without TP, EP and ETP the best layout is taken.
        nodes: hosts of the run.
        ranks_per_node: of each; None for those of the cluster.
        name: of the run; None for the model's.
        folder: where the file is to lie, since it names others relative to itself.
        network: variables for NCCL on the network between the nodes; None for one node.

    Raises:
        ValueError: model, cluster and layout do not go together.
    """
    cluster = priced_cluster(request.cluster, None)
    ranks_per_node = ranks_per_node or cluster.ranks_per_node
    most = cluster.num_ranks // ranks_per_node
    if nodes > most:
        raise ValueError(
            f"--nodes: got {nodes}, must be at most {most}, by the {cluster.num_ranks} ranks of "
            f"{request.cluster}; its num_nodes is that of the cluster"
        )
    inputs = read_inputs(replace(request, world_size=nodes * ranks_per_node))
    model, layout = inputs.model, inputs.layout
    if model.num_layers % layout.pp:
        raise ValueError(
            f"--pp: got {layout.pp}, must divide num_layers ({model.num_layers}) of {model.name}; "
            "for stages of several sizes leave it out, and write pp and "
            "decoder-first-pipeline-num-layers or decoder-last-pipeline-num-layers into the file"
        )
    sizes = {size: getattr(layout, size) for size in ("tp", "ep", "etp", "pp", "cp")}
    sections = _sections(model, layout)
    remarks = {f"megatron.{next(iter(part))}": title for title, part in sections.items()}
    if model.num_moe_layers < model.num_layers and "moe-layer-freq" not in model.megatron:
        remarks["megatron.moe-layer-freq"] = "taken: dense layers first"
    if inputs.ranking is not None:
        remarks["layout"] = "taken: of all that fit, the one whose exchange costs least"
    environment: dict[str, Any] = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if layout.tp > 1 or layout.cp > 1:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = 1
        remarks["environment.CUDA_DEVICE_MAX_CONNECTIONS"] = (
            "Megatron demands it before Blackwell where TP or CP is above 1."
        )
    network = network or NetworkEnvironment()
    environment |= network.values
    remarks |= {f"environment.{name}": text for name, text in network.remarks.items()}
    warnings = (*map(NOT_EXPRESSED.format, model.not_expressed), *model.taken)
    template = make_template(
        RunConfig,
        {
            "name": name or _name_of(model),
            "layout": {"nodes": nodes, "ranks_per_node": ranks_per_node, **sizes},
            "megatron": {key: value for part in sections.values() for key, value in part.items()},
            "model": _named_from(folder, str(request.model)),
            "cluster": _named_from(folder, str(request.cluster)),
            "environment": environment,
            # Without them a cluster with GRES gives a step no GPU, and the memory of one task.
            "slurm": {
                "time_limit_minutes": TIME_LIMIT_MINUTES,
                "options": {"gpus-per-node": ranks_per_node, "exclusive": True, "mem": 0},
            },
        },
        about=[
            "A run, for `monta launch --config`. Megatron's arguments follow from the model and "
            "the layout.",
            *([] if model.megatron else [COMPARE]),
            *(f"{warning}." for warning in warnings),
        ],
        remarks=remarks,
        flags=flags_of([] if name is None else ["name"]),
        proposed={"environment": network.proposed, "slurm.options": SBATCH_OPTIONS},
    )
    return replace(template, warnings=warnings)


def _name_of(model: Model) -> str:
    """The model's name as that of a folder."""
    return re.sub(r"[^a-z0-9]+", "_", model.name.lower()).strip("_") or "run"


def _named_from(folder: Path, file: str) -> str:
    """A file as a run file in `folder` names it; a preset stays one."""
    # The loader takes paths as relative to the run file.
    return os.path.relpath(file, folder) if Path(file).exists() else file


def _sections(model: Model, layout: ParallelLayout) -> Mapping[str, dict[str, Any]]:
    """Megatron's arguments by the comment above them."""
    own = model.megatron and {"max-position-embeddings": model.seq_length, **model.megatron}
    grouped = model.num_query_groups < model.num_attention_heads
    num_dense = model.num_layers - model.num_moe_layers
    precision = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}}
    batch = model.micro_batch_size * layout.dp * layout.pp * MICRO_BATCHES_PER_STAGE
    return {
        "Model, as its file says.": {
            "num-layers": model.num_layers,
            "hidden-size": model.hidden_size,
            "num-attention-heads": model.num_attention_heads,
            **(
                {"group-query-attention": True, "num-query-groups": model.num_query_groups}
                if grouped
                else {}
            ),
            **{name: value for name, value in own.items() if not name.startswith("moe-")},
        },
        **({} if own else {"Model, common choices.": _choices(model)}),
        "Experts, as the model file says.": {
            "num-experts": model.num_experts,
            "moe-ffn-hidden-size": model.moe_ffn_hidden_size,
            "moe-router-topk": model.moe_router_topk,
            **(
                {
                    "moe-router-num-groups": model.moe_router_num_groups,
                    "moe-router-group-topk": model.moe_router_group_topk,
                }
                if model.moe_router_num_groups is not None
                else {}
            ),
            **{name: value for name, value in own.items() if name.startswith("moe-")},
        },
        _expert_choices(model): {
            **({} if own else BALANCE),
            **(
                {"moe-layer-freq": f"([0]*{num_dense}+[1]*{model.num_moe_layers})"}
                if num_dense and "moe-layer-freq" not in own
                else {}
            ),
            "moe-grouped-gemm": True,
            "moe-permute-fusion": True,
            **({"moe-router-dtype": "fp32"} if _has_fp32_probs(model) else {}),
        },
        "Parallelism.": {
            **({"sequence-parallel": True} if layout.tp > 1 else {}),
            "use-distributed-optimizer": True,
            "overlap-grad-reduce": True,
            "overlap-param-gather": True,
        },
        "Training: yours to set.": {
            "seq-length": model.seq_length,
            "micro-batch-size": model.micro_batch_size,
            "global-batch-size": batch,
            "train-iters": 1000,
            "lr": 1.0e-4,
            "min-lr": 1.0e-5,
            "lr-decay-style": "cosine",
            "clip-grad": 1.0,
            **precision.get(torch_name(model.dtype), {}),
        },
        "Memory: only the inputs of layers are kept, as `monta plan` counts.": {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
        },
        "Data: random tokens, until a data path and a tokenizer are named.": {
            "mock-data": True,
            "split": "99,1,0",
            "tokenizer-type": "NullTokenizer",
            **({} if "vocab-size" in own else {"vocab-size": 32000}),
            "no-create-attention-mask-in-dataloader": True,
        },
        "Checkpoints and logs.": {
            "save": "${RUN_DIRECTORY}/checkpoints",
            "load": "${RUN_DIRECTORY}/checkpoints",
            "save-interval": 500,
            "exit-signal-handler": True,
            "eval-iters": 0,
            "eval-interval": 1000,
            "log-interval": 1,
            "log-throughput": True,
        },
    }


def _choices(model: Model) -> dict[str, Any]:
    """Arguments of a model of which sizes alone are known."""
    return {
        "ffn-hidden-size": model.moe_ffn_hidden_size,
        "max-position-embeddings": model.seq_length,
        **COMMON,
    }


def _has_fp32_probs(model: Model) -> bool:
    return torch_name(model.probs_dtype) == "float32"


def _expert_choices(model: Model) -> str:
    """The comment above the experts' chosen arguments."""
    if _has_fp32_probs(model):
        return "Experts, common choices."
    return (
        f"Experts, common choices; moe-router-dtype is left out: probs_dtype of the model is "
        f"{model.probs_dtype}."
    )
