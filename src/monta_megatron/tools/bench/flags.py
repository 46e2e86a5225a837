"""The flags of `monta bench` that become its settings, each in one entry. No torch.

The command line, sweep files and `monta timeline --record` take them from here. Values stay texts
until `settings.parse_settings` reads them, so that a bad one gives one line from one rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monta_megatron.common.flags import (
    DTYPE_BYTES,
    ROUTINGS,
    listed,
    name_of,
    num_tokens,
    positive,
    torch_name,
    whole,
)

if TYPE_CHECKING:
    from monta_megatron.chains.program import Phase

PHASES: "tuple[Phase, ...]" = ("forward", "forward_backward")
STOCK = ("alltoall", "allgather")
ALL_CHAINS = "all"
TRANSPORTS = ("nccl", "gloo")


@dataclass(frozen=True)
class Flag:
    """A flag with a value.

    Attributes:
        metavar: what stands for the value in the help.
        help: its text.
        read: makes the value from a text, as an argparse type does.
        default: the text that is read if none is given; None where it depends on something else.
    """

    metavar: str
    help: str
    read: Callable[[str], Any]
    default: str | None = None


# Imported when a flag is read: `--help` imports nothing that takes long.
def _chains() -> Sequence[str]:
    from monta_megatron.chains import CHAINS
    from monta_megatron.integration.options import AUTO

    return (*CHAINS, AUTO, ALL_CHAINS)


def _dtype(text: str) -> str:
    return torch_name(name_of(lambda: DTYPE_BYTES)(text))


# Flags that may differ between the points of a sweep.
POINT_FLAGS = {
    "experts": Flag("N", "experts of the layer", whole(1)),
    "top-k": Flag("N", "experts of each token", whole(1)),
    "hidden": Flag("N", "hidden size", whole(1)),
    "tokens": Flag("N", "tokens of each rank", num_tokens(1)),
    "dtype": Flag("NAME", "fp32, bf16 or fp16", _dtype, "fp32"),
    "tp": Flag("N", "tensor parallel size", whole(1), "1"),
    "ep": Flag("N", "expert parallel size (default: all ranks over --etp)", whole(1)),
    "etp": Flag("N", "expert tensor parallel size (default: --tp)", whole(1)),
    "routing": Flag("NAME", ", ".join(ROUTINGS), name_of(lambda: ROUTINGS), "uniform"),
    "chains": Flag(
        "LIST",
        "chains, auto (the planner's pick), or all that can run",
        listed(name_of(_chains)),
        ALL_CHAINS,
    ),
    "num-chunks": Flag("LIST", "chunks of each pipelined chain", listed(whole(1)), "1,4"),
    "stock": Flag(
        "LIST", "Megatron's dispatchers", listed(name_of(lambda: STOCK)), ",".join(STOCK)
    ),
    "phase": Flag("LIST", "what is timed", listed(name_of(lambda: PHASES)), ",".join(PHASES)),
    "ffn-hidden": Flag(
        "N", "experts' intermediate size, for --layer (default: --hidden)", whole(1)
    ),
    "expert-ms": Flag(
        "X",
        "instead of experts, for --layer: a timer that takes X ms for the rows of a rank, forward "
        "and again backward, and no processor; on CPU ranks",
        positive,
    ),
    "repeats": Flag("N", "timed runs of each", whole(1), "10"),
    "warmup": Flag("N", "runs of each before that", whole(0), "2"),
    "tune-steps": Flag(
        "N",
        "iterations in which the candidates of auto are tried before it is timed",
        whole(0),
        "0",
    ),
    "seed": Flag("N", "of the data", whole(0), "1"),
}
# Flags of the whole launch.
LAUNCH_FLAGS = {
    "ranks-per-node": Flag(
        "N", "ranks joined by the node link (default: what the launcher says)", whole(1)
    ),
    "cluster": Flag("FILE", "costs by which the planner predicts and chooses", str),
    "inter-rate-ratio": Flag("X", "rate of this network over that of --cluster", positive, "1"),
    "transport": Flag(
        "NAME",
        "nccl, or gloo: through the host, so that ranks can share a GPU; proves no order of "
        "streams",
        name_of(lambda: TRANSPORTS),
        "nccl",
    ),
}
FLAGS = POINT_FLAGS | LAUNCH_FLAGS
