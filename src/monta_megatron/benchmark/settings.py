"""What a benchmark was asked for: parsed from text, checked, frozen. No torch."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from monta_megatron.chains import CHAINS
from monta_megatron.names import one_of
from monta_megatron.options import AUTO
from monta_megatron.planner import ROUTINGS
from monta_megatron.planner.plan import Phase

PHASES: tuple[Phase, ...] = get_args(Phase)
STOCK = ("alltoall", "allgather")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One benchmark, resolved.

    Attributes:
        num_experts: experts of the layer.
        topk: experts of each token.
        hidden: hidden size.
        tokens: tokens of each rank.
        dtype: dtype of the rows; probabilities are fp32.
        tp: tensor parallel size.
        ep: expert parallel size.
        etp: expert tensor parallel size.
        routing: one of `planner.ROUTINGS`.
        chains: names of our chains, and "auto" for what the planner chooses.
        skip_refused: a chain that cannot run on this layout is left out and reported, instead of
            being an error; true where the chains were not asked for by name.
        num_chunks: numbers of chunks; every pipelined chain runs with each.
        stock: Megatron's dispatchers to compare; "alltoall" is always among them.
        phases: what is timed.
        layer: whether the layer with its experts is timed too.
        ffn_hidden: intermediate size of the experts.
        repeats: timed runs of every candidate.
        warmup: untimed runs of every candidate before those.
        seed: seed of the data.
        ranks_per_node: ranks joined by the fast tier, or None where the launcher knows.
        cluster: file of the costs by which the planner chooses, or None.
        inter_rate_ratio: this network's rate over the cluster file's; the costs are scaled by it.
        world_size: ranks of the launch.
        ablation: whether to run the steps of the MoNTA paper instead of chains.
        bound: whether to time the stages of alltoall_allgather alone too.
    """

    num_experts: int
    topk: int
    hidden: int
    tokens: int
    dtype: str
    tp: int
    ep: int
    etp: int
    routing: str
    chains: tuple[str, ...]
    skip_refused: bool
    num_chunks: tuple[int, ...]
    stock: tuple[str, ...]
    phases: tuple[Phase, ...]
    layer: bool
    ffn_hidden: int
    repeats: int
    warmup: int
    seed: int
    ranks_per_node: int | None
    cluster: str | None
    inter_rate_ratio: float
    world_size: int
    ablation: bool
    bound: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one hidden row."""
        return self.hidden * DTYPE_BYTES[self.dtype]


def parse_settings(flags: Mapping[str, Any] | argparse.Namespace, world_size: int) -> Settings:
    """Check the flags of the command line against each other and against the launch.

    Args:
        flags: their values by name, as text; None where not given.
        world_size: ranks of the launch.

    Raises:
        ValueError: a flag is wrong; names the flag, the value and the rule.
    """
    texts = vars(flags) if isinstance(flags, argparse.Namespace) else flags

    def integer(name: str, default: int | None = None, least: int = 1) -> int:
        text = texts.get(name)
        if text is None and default is not None:
            return default
        if text is None:
            raise ValueError(f"{_flag(name)}: not given, must be an integer >= {least}")
        return _integer(_flag(name), str(text), least)

    num_experts, topk, hidden = integer("experts"), integer("top_k"), integer("hidden")
    tp = integer("tp", 1)
    etp = integer("etp", tp)
    ep = integer("ep", max(world_size // etp, 1))
    chains, by_name = _chains(texts.get("chains") or "all")
    stock = _names("--stock", texts.get("stock") or ",".join(STOCK), STOCK)
    settings = Settings(
        num_experts=num_experts,
        topk=topk,
        hidden=hidden,
        tokens=integer("tokens"),
        dtype=_names("--dtype", texts.get("dtype") or "float32", DTYPE_BYTES)[0],
        tp=tp,
        ep=ep,
        etp=etp,
        routing=_names("--routing", texts.get("routing") or ROUTINGS[0], ROUTINGS)[0],
        chains=chains,
        skip_refused=not by_name,
        num_chunks=tuple(
            _integer("--num-chunks", text, 1)
            for text in _list("--num-chunks", texts.get("num_chunks") or "1,4")
        ),
        # alltoall is the base of every ratio.
        stock=tuple(dict.fromkeys(("alltoall", *stock))),
        phases=_names("--phase", texts.get("phase") or ",".join(PHASES), PHASES),  # type: ignore[arg-type]
        layer=bool(texts.get("layer")),
        ffn_hidden=integer("ffn_hidden", hidden),
        repeats=integer("repeats", 10),
        warmup=integer("warmup", 2, least=0),
        seed=integer("seed", 1, least=0),
        ranks_per_node=integer("ranks_per_node") if texts.get("ranks_per_node") else None,
        cluster=texts.get("cluster"),
        inter_rate_ratio=positive_number(
            "--inter-rate-ratio", texts.get("inter_rate_ratio") or "1"
        ),
        world_size=world_size,
        ablation=bool(texts.get("ablation")),
        bound=bool(texts.get("bound")),
    )
    _check_together(settings)
    return settings


def _check_together(settings: Settings) -> None:
    """The rules between flags."""

    def rule(holds: bool, name: str, value: int, text: str) -> None:
        if not holds:
            raise ValueError(f"{_flag(name)}: got {value}, must be {text}")

    world_size, ep, etp, tp = settings.world_size, settings.ep, settings.etp, settings.tp
    rule(world_size % tp == 0, "tp", tp, f"a divisor of the {world_size} ranks of this launch")
    rule(
        world_size % (ep * etp) == 0,
        "ep",
        ep,
        f"such that ep x etp ({ep} x {etp}) divides the {world_size} ranks of this launch",
    )
    num_experts = settings.num_experts
    rule(num_experts % ep == 0, "experts", num_experts, f"a multiple of --ep ({ep})")
    rule(settings.topk <= num_experts, "top_k", settings.topk, f"at most --experts ({num_experts})")
    rule(settings.hidden % tp == 0, "hidden", settings.hidden, f"a multiple of --tp ({tp})")
    ffn_hidden = settings.ffn_hidden
    rule(ffn_hidden % etp == 0, "ffn_hidden", ffn_hidden, f"a multiple of --etp ({etp})")
    rule(
        etp > 1 or not settings.bound, "etp", etp, "above 1 for --bound: it is about AllGather(ETP)"
    )
    if settings.cluster is None and settings.inter_rate_ratio != 1:
        ratio = settings.inter_rate_ratio
        raise ValueError(f"--inter-rate-ratio: got {ratio:g}, must come with --cluster")
    if settings.ablation:
        if not settings.skip_refused:
            chains = ",".join(settings.chains)
            raise ValueError(f"--chains: got {chains}, must be left out with --ablation")
        rule(tp > 1, "tp", tp, "above 1 for --ablation, which drops tensor-parallel duplicates")
        rule(etp == tp, "etp", etp, f"equal to --tp ({tp}) for --ablation")


def _chains(text: str) -> tuple[tuple[str, ...], bool]:
    """The chains of `--chains`, and whether they were asked for by name."""
    if text == "all":
        return (*CHAINS, AUTO), False
    return _names("--chains", text, (*CHAINS, AUTO), also="all"), True


def _names(
    flag: str, text: str, known: Mapping[str, Any] | tuple[str, ...], also: str | None = None
) -> tuple[str, ...]:
    names = _list(flag, text)
    for name in names:
        if name not in known:
            choices = [*known, *([also] if also else [])]
            raise ValueError(f"{flag}: got {name!r}, must be {one_of(name, choices)}")
    return tuple(dict.fromkeys(names))


def _list(flag: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"{flag}: got {text!r}, must be a list such as a,b without empty parts")
    return parts


def _integer(flag: str, text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ValueError(f"{flag}: got {text!r}, must be an integer >= {least}")
    return value


def positive_number(flag: str, text: str) -> float:
    """The value of a flag that takes a number > 0.

    Raises:
        ValueError: the value is not one.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{flag}: got {text!r}, must be a number > 0")
    return value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
