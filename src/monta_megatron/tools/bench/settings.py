"""Settings of a benchmark, each with its flag: parsed from text, checked, frozen. No torch.

The command line and sweep files take their flags from here. Values stay texts until
`parse_settings` reads them, so that a bad one gives one line from one rank.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from monta_megatron.common.errors import UserError
from monta_megatron.common.rules import listed, name_of, num_tokens, whole
from monta_megatron.core import Choice

# As in `chains.program`, which `--help` does not import.
Phase: TypeAlias = Literal["forward", "forward_backward"]
# PyTorch's names.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PHASES, STOCK = get_args(Phase), ("alltoall", "allgather")
# See `candidates.draw_experts`.
ROUTINGS = ("uniform", "skewed")
# Largest number of terms that the check of correctness sums exactly in bf16: a term is at most 2,
# and bf16 represents every integer up to 256.
MAX_TERMS = 128


class Flag(NamedTuple):
    """A flag with a value.

    Attributes:
        read: function that converts the text to the value, as an argparse type does.
        metavar: placeholder of the value in the usage.
        help: help text, without its default and its full stop.
        default: text that is read if none is given; None where it depends on something else.
    """

    read: Callable[[str], Any]
    metavar: str
    help: str
    default: str | None = None


def _setting(*flag: Any) -> Any:
    return field(metadata={"flag": Flag(*flag)})


def _chains() -> tuple[str, ...]:
    from monta_megatron.chains import CHAINS
    from monta_megatron.integration.options import AUTO

    return (*CHAINS, AUTO)


def _dtype(text: str) -> str:
    return DTYPES[name_of(lambda: DTYPES)(text)]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One benchmark, resolved; the help texts explain the flags of the same names.

    Attributes:
        layer: whether the whole layer with its experts is timed too.
        skip_incompatible: whether a chain that cannot run on this layout is left out and reported;
            False where chains were named.
    """

    experts: int = _setting(whole(1), "N", "Experts in the layer")
    top_k: int = _setting(whole(1), "N", "Experts per token")
    hidden: int = _setting(whole(1), "N", "Hidden size")
    tokens: int = _setting(num_tokens, "N", "Tokens per rank")
    dtype: str = _setting(_dtype, "DTYPE", "Data type: fp32, bf16 or fp16", "fp32")
    tp: int = _setting(whole(1), "N", "Tensor parallel size", "1")
    ep: int = _setting(whole(1), "N", "Expert parallel size (default: all ranks / --etp)")
    etp: int = _setting(whole(1), "N", "Expert tensor parallel size (default: --tp)")
    routing: str = _setting(
        name_of(lambda: ROUTINGS), "NAME", f"Routing: {' or '.join(ROUTINGS)}", "uniform"
    )
    chains: tuple[str, ...] = _setting(
        listed(name_of(_chains)),
        "NAMES",
        "Chains to time, and auto for the planner's choice (default: all that can run)",
    )
    num_chunks: tuple[int, ...] = _setting(
        listed(whole(1)), "N,...", "Numbers of chunks to time each pipelined chain with", "1,4"
    )
    stock: tuple[str, ...] = _setting(
        listed(name_of(lambda: STOCK)), "NAMES", "Megatron dispatchers to time", ",".join(STOCK)
    )
    phase: tuple[Phase, ...] = _setting(
        listed(name_of(lambda: PHASES)),
        "NAMES",
        f"Phases to time: {', '.join(PHASES)}",
        "forward_backward",
    )
    ffn_hidden: int = _setting(
        whole(1), "N", "Intermediate size of the experts, for --layer (default: --hidden)"
    )
    repeats: int = _setting(whole(1), "N", "Timed runs per candidate, after one warm-up", "5")
    tune_steps: int = _setting(
        whole(0), "N", "Iterations in which auto tries its candidates before it is timed", "0"
    )
    seed: int = _setting(whole(0), "N", "Random seed for the input data", "1")
    ranks_per_node: int | None = _setting(
        whole(1), "N", "Ranks per node (default: from the launcher)"
    )
    cluster: str | None = _setting(
        str, "FILE", "Cluster file that predictions and the choice of auto are based on"
    )
    trace: str | None = _setting(
        str,
        "FILE",
        "Record one run per row of the exchange as a Chrome trace, for Perfetto and monta timeline",
    )
    layer: bool
    skip_incompatible: bool

    @property
    def choices(self) -> list[Choice | None]:
        """Choices to run; None where auto chooses."""
        from monta_megatron.chains import CHAINS

        choices: list[Choice | None] = []
        for name in self.chains:
            chain = CHAINS.get(name)
            if chain is None:
                choices.append(None)
            else:
                numbers = (1,) if chain.serial else self.num_chunks
                choices += [Choice(chain=name, num_chunks=number) for number in numbers]
        return choices


FLAGS: dict[str, Flag] = {
    entry.name.replace("_", "-"): entry.metadata["flag"]
    for entry in fields(Settings)
    if entry.metadata
}


def parse_settings(texts: Mapping[str, Any], world_size: int) -> Settings:
    """Check the flags of the command line against each other and against the launch.

    Args:
        texts: text of each flag, by its name with underscores; None where not given.
        world_size: number of ranks of the launch.

    Raises:
        UserError: one line that names the flag, its value and the rule.
    """
    given: dict[str, Any] = {"layer": bool(texts.get("layer"))}
    for name, flag in FLAGS.items():
        key = name.replace("-", "_")
        text = flag.default if texts.get(key) is None else str(texts[key])
        try:
            given[key] = None if text is None else flag.read(text)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"--{name}: {error}") from error
    for key in ("experts", "top_k", "hidden", "tokens"):
        if given[key] is None:
            raise UserError(f"--{key.replace('_', '-')}: not given, must be an integer >= 1")
    given["etp"] = given["etp"] or given["tp"]
    given["ep"] = given["ep"] or max(world_size // given["etp"], 1)
    given["ffn_hidden"] = given["ffn_hidden"] or given["hidden"]
    # alltoall is the base of every ratio.
    given["stock"] = tuple(dict.fromkeys(("alltoall", *given["stock"])))
    given["skip_incompatible"] = given["chains"] is None
    given["chains"] = given["chains"] or _chains()
    settings = Settings(**given)
    for key, holds, rule in _rules(settings, world_size):
        if not holds:
            name = key.replace("_", "-")
            raise UserError(f"--{name}: got {getattr(settings, key)}, must {rule}")
    return settings


def _rules(settings: Settings, world_size: int) -> list[tuple[str, bool, str]]:
    """The rules between flags: a setting's name, whether its rule holds, the rule."""
    ep, etp, tp, experts = settings.ep, settings.etp, settings.tp, settings.experts
    ranks, has_auto = f"the {world_size} ranks of this launch", None in settings.choices
    return [
        ("tp", world_size % tp == 0, f"be a divisor of {ranks}"),
        (
            "ep",
            world_size % (ep * etp) == 0,
            f"be such that ep x etp ({ep} x {etp}) divides {ranks}",
        ),
        ("experts", experts % ep == 0, f"be a multiple of --ep ({ep})"),
        ("top_k", settings.top_k <= experts, f"be at most --experts ({experts})"),
        ("top_k", settings.top_k * etp <= MAX_TERMS, f"be at most {MAX_TERMS} over --etp"),
        ("hidden", settings.hidden % tp == 0, f"be a multiple of --tp ({tp})"),
        ("ffn_hidden", settings.ffn_hidden % etp == 0, f"be a multiple of --etp ({etp})"),
        ("tune_steps", has_auto or not settings.tune_steps, "come with --chains auto"),
    ]
