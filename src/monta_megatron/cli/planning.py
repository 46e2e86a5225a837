"""Flags that `plan` and `timeline` share: model, cluster, layout, tokens, a chain; flags apart."""

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from monta_megatron.common.rules import name_of, num_tokens, whole

if TYPE_CHECKING:
    from monta_megatron.tools.plan.request import PlanRequest

FILES = {
    "model": "a file, a config.json of Hugging Face or its folder, or a preset by its name in "
    "configs/models",
    "cluster": "a file, or a preset by its name in configs/clusters",
}
# Flag -> how its value is read, and help.
FLAGS = {
    "world-size": (whole(1), "all ranks (default: those of the cluster)"),
    "ranks-per-node": (whole(1), "that the job uses of a node, or host (default: all)"),
    "tp": (whole(1), "tensor parallel size, with sequence parallelism"),
    "ep": (whole(1), "expert parallel size"),
    "etp": (whole(1), "expert tensor parallel size"),
    "cp": (whole(1), "context parallel size"),
    "pp": (whole(1), "pipeline parallel size"),
    "tokens": (num_tokens(1), "of a rank (default: the model's batch)"),
    "seq-length": (num_tokens(1), "tokens of a sequence (default: the model's)"),
    "micro-batch-size": (whole(1), "sequences of a micro-batch (default: the model's)"),
    "global-batch-size": (whole(1), "sequences of an iteration, for what it gains"),
}


def add_arguments(parser: Any, flags: Iterable[str], chain_help: str) -> None:
    """Add the flags for the files, some of `FLAGS`, and --chain."""
    for name, text in FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=text)
    for name in flags:
        read, text = FLAGS[name]
        parser.add_argument(f"--{name}", metavar="N", type=read, help=text)
    parser.add_argument("--chain", metavar="NAME", type=name_of(_chains), help=chain_help)


def _chains() -> Iterable[str]:
    from monta_megatron.chains import CHAINS

    return CHAINS


def request_of(parsed: argparse.Namespace) -> "PlanRequest":
    """The request that the flags make."""
    from monta_megatron.tools.plan.request import PlanRequest

    names = ("model", "cluster", *(name.replace("-", "_") for name in FLAGS))
    return PlanRequest(**{name: getattr(parsed, name, None) for name in names})


def check_given(
    parsed: argparse.Namespace, needed: Iterable[str], others: Iterable[str], way: str
) -> None:
    """Check flags that depend on the way a command is used.

    Args:
        parsed: the flags.
        needed: must be given.
        others: must be left out.
        way: for the message, such as "with --log".

    Raises:
        ValueError: one is missing, or should be.
    """
    for name in needed:
        if getattr(parsed, name.replace("-", "_")) is None:
            raise ValueError(f"--{name}: not given, must be {way}")
    for name in others:
        value = getattr(parsed, name.replace("-", "_"))
        if value not in (None, False):
            raise ValueError(f"--{name}: got {value}, must be left out {way}")
