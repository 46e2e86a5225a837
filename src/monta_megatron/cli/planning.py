"""The flags of `plan`, `timeline` and `simulate`: model, cluster, layout, tokens, routing."""

import argparse
import sys
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from monta_megatron.common.flags import positive, whole
from monta_megatron.planner.routing_names import ROUTING_HELP, routing_or_folder

if TYPE_CHECKING:
    from monta_megatron.tools.plan.plan_request import PlanRequest
    from monta_megatron.tools.plan.request import PlanInputs

FILES = {
    "model": "a file, a config.json of Hugging Face or its folder, or a preset by its name in "
    "configs/models",
    "cluster": "a file, or a preset by its name in configs/clusters",
}
SIZES = {
    "world-size": "all ranks (default: those of the cluster)",
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
IGNORE_MEMORY = "go on where a rank's memory is too small for the training"


def add_arguments(parser: Any, needs_model: bool = True, says_gain: bool = True) -> None:
    """Add the flags that say what is exchanged, and on which cluster.

    Args:
        parser: of the sub-command.
        needs_model: whether the model and the cluster have to be given.
        says_gain: whether it says what an iteration gains.
    """
    for name, text in FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", required=needs_model, help=text)
    parser.add_argument("--layout", metavar="FILE", help="YAML with the sizes below")
    for name, text in SIZES.items():
        parser.add_argument(f"--{name}", metavar="N", type=whole(1), help=text)
    parser.add_argument(
        "--tokens", metavar="N", type=whole(0), help="of a rank (default: the model's batch)"
    )
    for name, text in BATCH.items():
        parser.add_argument(f"--{name}", metavar="N", type=whole(1), help=text)
    parser.add_argument(
        "--routing",
        metavar="NAME|FOLDER",
        type=routing_or_folder,
        default="uniform",
        help=f"{ROUTING_HELP} (default: %(default)s, by the model's router)",
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
    add_kernels(parser)
    add_ctas(parser, "the cluster file's")
    parser.add_argument(
        "--wire-dtype",
        choices=("fp8",),
        help="tokens travel to their experts in eight bits (default: in their own dtype)",
    )
    parser.add_argument("--ignore-memory", action="store_true", help=IGNORE_MEMORY)


def add_kernels(parser: Any) -> None:
    """Add the flag that says which kernels are priced."""
    parser.add_argument(
        "--kernels",
        choices=("auto", "torch", "fused"),
        default="auto",
        help="what copies and sums rows, as --moe-monta-kernels: PyTorch's operations or Triton "
        "kernels (default: auto, fused where the ranks are GPUs)",
    )


def add_ctas(parser: Any, default: str) -> None:
    """Add the flags for the budgets of rails and nodes; `default` says what holds without them."""
    for name in ("rail", "node"):
        parser.add_argument(
            f"--{name}-ctas",
            metavar="N",
            type=whole(1),
            help=f"SMs that the NCCL communicator of a {name} may keep busy, as "
            f"--moe-monta-{name}-ctas (default: {default})",
        )


def add_overlap_experts(parser: Any) -> None:
    """Add the flag that plans a layer, not its exchange alone."""
    parser.add_argument(
        "--overlap-experts",
        action="store_true",
        help="plan a layer whose experts may run in the pipeline, as --moe-monta-overlap-experts "
        "does, by what the cluster file says of them or else by their FLOPs",
    )


def check_has_layout(parsed: argparse.Namespace, flag: str, reason: str) -> None:
    """Refuse a flag that needs a layout where none is given.

    Raises:
        ValueError: none is.
    """
    if not any((parsed.layout, parsed.tp, parsed.ep, parsed.etp)):
        raise ValueError(f"{flag}, must be with a layout (--ep N): {reason}")


def read(parsed: argparse.Namespace, **settings: Any) -> "tuple[PlanRequest, PlanInputs]":
    """The request that the flags make, and what it names.

    Args:
        parsed: the command line.
        settings: arguments of `planner.selection.select`, for the ranking of layouts.

    Raises:
        ValueError: a file or flag is wrong, or the layout does not fit.
    """
    from monta_megatron.common.progress import show_progress
    from monta_megatron.tools.plan.plan_request import PlanRequest
    from monta_megatron.tools.plan.request import read_inputs

    request = PlanRequest(
        **{
            entry.name: getattr(parsed, entry.name)
            for entry in fields(PlanRequest)
            if entry.name in parsed
        }
    )
    # A terminal shows progress, a log does not need it.
    progress = partial(show_progress, parsed.command, sys.stderr.isatty())
    return request, read_inputs(request, progress, **settings)
