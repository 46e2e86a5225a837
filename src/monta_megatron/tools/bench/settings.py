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
# Terms of a sum that the check of correctness has exactly in bf16: each is 2 at most, and bf16 has
# every integer up to 256.
MOST_TERMS = 128


class Flag(NamedTuple):
    """A flag with a value.

    Attributes:
        read: makes the value from a text, as an argparse type does.
        help: its text.
        default: the text that is read if none is given; None where it depends on something else.
    """

    read: Callable[[str], Any]
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
        layer: time the layer with its experts too.
        skip_incompatible: leave out a chain that cannot run on this layout, and report it: where
            the chains were not asked for by name.
    """

    experts: int = _setting(whole(1), "experts of the layer")
    top_k: int = _setting(whole(1), "experts of each token")
    hidden: int = _setting(whole(1), "hidden size")
    tokens: int = _setting(num_tokens, "tokens of each rank")
    dtype: str = _setting(_dtype, "fp32, bf16 or fp16", "fp32")
    tp: int = _setting(whole(1), "tensor parallel size", "1")
    ep: int = _setting(whole(1), "expert parallel size (default: all ranks over --etp)")
    etp: int = _setting(whole(1), "expert tensor parallel size (default: --tp)")
    routing: str = _setting(name_of(lambda: ROUTINGS), " or ".join(ROUTINGS), "uniform")
    chains: tuple[str, ...] = _setting(
        listed(name_of(_chains)),
        "chains, and auto (the planner's pick) (default: all that can run)",
    )
    num_chunks: tuple[int, ...] = _setting(
        listed(whole(1)), "chunks of each pipelined chain", "1,4"
    )
    stock: tuple[str, ...] = _setting(
        listed(name_of(lambda: STOCK)), "Megatron's dispatchers", ",".join(STOCK)
    )
    phase: tuple[Phase, ...] = _setting(
        listed(name_of(lambda: PHASES)), "phases: " + ", ".join(PHASES), "forward_backward"
    )
    ffn_hidden: int = _setting(
        whole(1), "experts' intermediate size, for --layer (default: --hidden)"
    )
    repeats: int = _setting(whole(1), "timed runs of each, after one that is not", "5")
    tune_steps: int = _setting(
        whole(0), "iterations in which auto tries its candidates before it is timed", "0"
    )
    seed: int = _setting(whole(0), "of the data", "1")
    ranks_per_node: int | None = _setting(
        whole(1), "ranks joined by the node link (default: as launched)"
    )
    cluster: str | None = _setting(
        str, "file of the costs by which the planner predicts and chooses"
    )
    trace: str | None = _setting(
        str,
        "record a run of every row of the exchange: a Chrome trace for Perfetto and monta timeline",
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
        texts: flags by name, with underscores; None where not given.
        world_size: ranks of the launch.

    Raises:
        UserError: a flag is wrong; names the flag, the value and the rule.
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
        ("top_k", settings.top_k * etp <= MOST_TERMS, f"be at most {MOST_TERMS} over --etp"),
        ("hidden", settings.hidden % tp == 0, f"be a multiple of --tp ({tp})"),
        ("ffn_hidden", settings.ffn_hidden % etp == 0, f"be a multiple of --etp ({etp})"),
        ("tune_steps", has_auto or not settings.tune_steps, "come with --chains auto"),
    ]
