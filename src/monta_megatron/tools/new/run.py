"""A run file for a model, a cluster and a layout, with the arguments that follow from them."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.model import Model
from monta_megatron.tools.launch.run_config import RunConfig
from monta_megatron.tools.new.template import Template, make_template
from monta_megatron.tools.plan.plan_request import PlanRequest
from monta_megatron.tools.plan.request import cluster_with_rate, read_inputs

# Micro-batches of each rank in an iteration, for every pipeline stage: enough to fill them.
MICRO_BATCHES_PER_STAGE = 4


def run_template(
    request: PlanRequest,
    *,
    nodes: int,
    ranks_per_node: int | None,
    name: str | None,
    folder: Path,
) -> Template:
    """The template of a run file.

    Args:
        request: files or presets, and sizes; without TP, EP and ETP the best layout is taken.
        nodes: hosts of the run.
        ranks_per_node: of each; None for those of the cluster.
        name: of the run; None for the model's.
        folder: where the file is to lie, since it names others relative to itself.

    Raises:
        ValueError: model, cluster and layout do not go together.
    """
    cluster = cluster_with_rate(request.cluster, None)
    ranks_per_node = ranks_per_node or cluster.ranks_per_node
    most = cluster.num_ranks // ranks_per_node
    if nodes > most:
        raise ValueError(
            f"--nodes: got {nodes}, must be at most {most}, by the {cluster.num_ranks} ranks of "
            f"{request.cluster}; its num_nodes is that of the cluster"
        )
    inputs = read_inputs(replace(request, world_size=nodes * ranks_per_node))
    layout = inputs.layout
    sizes = {size: getattr(layout, size) for size in ("tp", "ep", "etp", "pp", "cp")}
    sections = _sections(inputs.model, layout)
    remarks = {f"megatron.{next(iter(part))}": title for title, part in sections.items()}
    if inputs.ranking is not None:
        remarks["layout"] = "taken: of all that fit, the one whose exchange costs least"
    environment: dict[str, Any] = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if layout.tp > 1 or layout.cp > 1:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = 1
        remarks["environment.CUDA_DEVICE_MAX_CONNECTIONS"] = (
            "Megatron demands it before Blackwell where TP or CP is above 1."
        )
    return make_template(
        RunConfig,
        {
            "name": name or _name_of(inputs.model),
            "layout": {"nodes": nodes, "ranks_per_node": ranks_per_node, **sizes},
            "megatron": {key: value for part in sections.values() for key, value in part.items()},
            "model": _named_from(folder, str(request.model)),
            "cluster": _named_from(folder, str(request.cluster)),
            "environment": environment,
        },
        about=[
            "A run, for `monta launch --config`. Megatron's arguments follow from the model and "
            "the layout where they can; what a model file does not hold is a common choice, so "
            "compare it with the model: position embedding, normalization, latent attention, dense "
            "and shared feed-forward sizes, router scores, vocabulary.",
        ],
        remarks=remarks,
    )


def _name_of(model: Model) -> str:
    """The model's name as that of a folder."""
    return re.sub(r"[^a-z0-9]+", "_", model.name.lower()).strip("_") or "run"


def _named_from(folder: Path, file: str) -> str:
    """A file as a run file in `folder` names it; a preset stays one."""
    # The loader takes paths as relative to the run file.
    return os.path.relpath(file, folder) if Path(file).exists() else file


def _sections(model: Model, layout: ParallelLayout) -> Mapping[str, dict[str, Any]]:
    """Megatron's arguments by the comment above them."""
    grouped = model.num_query_groups < model.num_attention_heads
    num_dense = model.num_layers - model.num_moe_layers
    dtype = {"bf16": True} if model.value_bytes == 2 else {}
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
        },
        "Model, common choices.": {
            "ffn-hidden-size": model.moe_ffn_hidden_size,
            "max-position-embeddings": model.seq_length,
            "position-embedding-type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
            "disable-bias-linear": True,
            "untie-embeddings-and-output-weights": True,
            "attention-dropout": 0.0,
            "hidden-dropout": 0.0,
        },
        "Experts, as the model file says.": {
            "num-experts": model.num_experts,
            **({"moe-layer-freq": _frequency(num_dense, model)} if num_dense else {}),
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
        },
        "Experts, common choices.": {
            "moe-router-load-balancing-type": "aux_loss",
            "moe-aux-loss-coeff": 1.0e-2,
            "moe-grouped-gemm": True,
            "moe-permute-fusion": True,
            "moe-router-dtype": "fp32",
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
            **dtype,
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
            "vocab-size": 32000,
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


def _frequency(num_dense: int, model: Model) -> str:
    """Dense layers come first where there are some."""
    return f"([0]*{num_dense}+[1]*{model.num_moe_layers})"
