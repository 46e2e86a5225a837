"""The flags of `plan` and `timeline`: model, cluster, layout, tokens, routing."""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from monta_megatron.common.flags import ROUTINGS, num_tokens, positive, whole

if TYPE_CHECKING:
    from monta_megatron.tools.plan.request import PlanInputs, PlanRequest

FILES = {
    "model": "a file, a config.json of Hugging Face or its folder, or a preset by its name in "
    "configs/models",
    "cluster": "a file, or a preset by its name in configs/clusters",
}
JOB = {
    "world-size": "all ranks (default: those of the cluster)",
    "nodes": "hosts, as --world-size in its other form",
    "ranks-per-node": "that the job uses of a host, with --nodes (default: the cluster's)",
}
SIZES = {
    "tp": "tensor parallel size, with sequence parallelism",
    "ep": "expert parallel size",
    "etp": "expert tensor parallel size",
    "cp": "context parallel size",
    "pp": "pipeline parallel size",
}
BATCH = {
    "seq-length": "tokens of a sequence (default: the model's)",
    "micro-batch-size": "sequences of a micro-batch (default: the model's)",
}


def add_arguments(parser: Any, needs_model: bool = True, says_gain: bool = True) -> None:
    """Add the flags for the exchange and the cluster.

    Args:
        parser: of the sub-command.
        needs_model: whether the model and the cluster have to be given.
        says_gain: whether it plans, and says what an iteration gains.
    """
    for name, text in FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", required=needs_model, help=text)
    parser.add_argument("--layout", metavar="FILE", help="YAML with the sizes below")
    add_sizes(parser, {**JOB, **SIZES})
    parser.add_argument(
        "--tokens", metavar="N", type=num_tokens(0), help="of a rank (default: the model's batch)"
    )
    add_sizes(parser, BATCH)
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        default="uniform",
        help="of the tokens (default: %(default)s, by the model's router)",
    )
    parser.add_argument(
        "--phase",
        choices=("forward", "forward_backward"),
        default="forward_backward",
        help="what has to be fast (default: %(default)s)",
    )
    parser.add_argument(
        "--inter-rate-ratio",
        metavar="X",
        type=positive,
        help="price a network with X times the cluster's rate",
    )
    if says_gain:
        parser.add_argument(
            "--global-batch-size",
            metavar="N",
            type=whole(1),
            help="sequences of an iteration, for what it gains",
        )
    else:
        parser.set_defaults(global_batch_size=None)
    parser.add_argument(
        "--kernels",
        choices=("auto", "torch", "fused"),
        default="auto",
        help="what copies and sums rows, as --moe-monta-kernels: PyTorch's operations or Triton "
        "kernels (default: auto, fused where the ranks are GPUs)",
    )


def add_sizes(parser: Any, sizes: Mapping[str, str]) -> None:
    """Add flags that take a number: name -> meaning."""
    for name, text in sizes.items():
        reader = num_tokens(1) if name == "seq-length" else whole(1)
        parser.add_argument(f"--{name}", metavar="N", type=reader, help=text)


def world_size_of(parsed: argparse.Namespace, ranks_per_node: Callable[[], int]) -> int | None:
    """All ranks of a job, from --world-size or --nodes; None where neither is given.

    Args:
        parsed: with the flags of `JOB`.
        ranks_per_node: those of a host where --ranks-per-node is not given.

    Raises:
        ValueError: the flags do not agree, or --ranks-per-node stands alone.
    """
    world_size: int | None = parsed.world_size
    if parsed.nodes is None:
        if parsed.ranks_per_node is not None:
            raise ValueError(f"--ranks-per-node: got {parsed.ranks_per_node}, must be with --nodes")
        return world_size
    in_nodes = int(parsed.nodes * (parsed.ranks_per_node or ranks_per_node()))
    if world_size not in (None, in_nodes):
        raise ValueError(
            f"--world-size: got {world_size}, must be {in_nodes}, the ranks of --nodes "
            f"{parsed.nodes}, or be left out"
        )
    return in_nodes


def has_layout(parsed: argparse.Namespace) -> bool:
    """Whether a layout is given; without one, all are ranked."""
    return any((parsed.layout, parsed.tp, parsed.ep, parsed.etp))


def _ranks_per_host(cluster: str) -> int:
    from monta_megatron.planner.cluster_file import load_cluster

    loaded = load_cluster(cluster)
    return loaded.ranks_per_host or loaded.ranks_per_node


def request_of(parsed: argparse.Namespace) -> "PlanRequest":
    """The request that the flags make.

    Raises:
        ValueError: flags do not agree.
    """
    from monta_megatron.tools.plan.request import PlanRequest

    return PlanRequest(
        model=parsed.model,
        cluster=parsed.cluster,
        layout=parsed.layout,
        global_batch_size=parsed.global_batch_size,
        world_size=world_size_of(parsed, lambda: _ranks_per_host(parsed.cluster)),
        ranks_per_node=parsed.ranks_per_node,
        tp=parsed.tp,
        ep=parsed.ep,
        etp=parsed.etp,
        cp=parsed.cp,
        pp=parsed.pp,
        tokens=parsed.tokens,
        seq_length=parsed.seq_length,
        micro_batch_size=parsed.micro_batch_size,
        routing=parsed.routing,
        phase=parsed.phase,
        inter_rate_ratio=parsed.inter_rate_ratio,
        kernels=parsed.kernels,
    )


def inputs_of(parsed: argparse.Namespace, request: "PlanRequest") -> "PlanInputs":
    """The inputs that a request names, with progress on a terminal.

    Raises:
        ValueError: a file is wrong, or the layout does not fit the model.
    """
    from monta_megatron.common.tables import Progress
    from monta_megatron.tools.plan.request import read_inputs

    # A terminal shows progress, a log does not need it.
    return read_inputs(request, Progress(parsed.command if sys.stderr.isatty() else None))
