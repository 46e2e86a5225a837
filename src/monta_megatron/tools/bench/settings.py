"""Settings of a benchmark: parsed from text, checked, frozen. No torch."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import Phase
from monta_megatron.common.flags import DTYPE_BYTES
from monta_megatron.integration.options import AUTO
from monta_megatron.tools.bench.flags import ALL_CHAINS, FLAGS


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The MoE layer whose exchange is measured.

    Attributes:
        num_experts: experts of the layer.
        topk: experts of each token.
        hidden: hidden size.
        ffn_hidden: intermediate size of the experts.
        dtype: PyTorch's name of the dtype of parameters and rows; probabilities are fp32.
        tp: tensor parallel size.
        ep: expert parallel size.
        etp: expert tensor parallel size.
    """

    num_experts: int
    topk: int
    hidden: int
    ffn_hidden: int
    dtype: str
    tp: int
    ep: int
    etp: int


@dataclass(frozen=True, kw_only=True)
class Settings(LayerShape):
    """One benchmark, resolved.

    Attributes:
        tokens: tokens of each rank.
        routing: one of `common.flags.ROUTINGS`.
        chains: names of our chains, and "auto" for what the planner chooses.
        skip_incompatible: a chain that cannot run on this layout is left out and reported, instead
            of being an error; true where the chains were not asked for by name.
        num_chunks: numbers of chunks; every pipelined chain runs with each.
        stock: Megatron's dispatchers to compare; "alltoall" is always among them.
        phases: what is timed.
        layer: whether the layer with its experts is timed too.
        overlap_experts: whether layers with their experts in the pipeline are among them.
        expert_ms: time that stands for the experts, see `layer.TimedExperts`; None for Megatron's.
        repeats: timed runs of every candidate.
        warmup: untimed runs of every candidate before those.
        tune_steps: iterations of tuning, before "auto" is timed.
        seed: seed of the data.
        ranks_per_node: ranks joined by the node link, or None where the launcher knows.
        cluster: file of the costs by which the planner chooses, or None.
        inter_rate_ratio: this network's rate over the cluster file's; the costs are scaled by it.
        transport: "nccl", or "gloo" through the host; CPU ranks use Gloo either way.
        world_size: ranks of the launch.
    """

    tokens: int
    routing: str
    chains: tuple[str, ...]
    skip_incompatible: bool
    num_chunks: tuple[int, ...]
    stock: tuple[str, ...]
    phases: tuple[Phase, ...]
    layer: bool
    overlap_experts: bool
    expert_ms: float | None
    repeats: int
    warmup: int
    tune_steps: int
    seed: int
    ranks_per_node: int | None
    cluster: str | None
    inter_rate_ratio: float
    transport: str
    world_size: int

    @property
    def overlap_keys(self) -> list[tuple[str, int | None]]:
        """Chains and numbers of chunks that run with their experts in the pipeline.

        "auto", without a number, where the planner chooses whether they do.
        """
        if not self.overlap_experts:
            return []
        keys: list[tuple[str, int | None]] = [
            (name, num_chunks)
            for name in self.chains
            for num_chunks in self.num_chunks
            if name != AUTO and CHAINS[name].rows == "tokens" and num_chunks > 1
        ]
        return [*keys, (AUTO, None)] if AUTO in self.chains else keys

    def crossing_bytes(self, backward: bool) -> int:
        """Bytes with which a row that crosses does so: dispatch, combine, and their backward."""
        return (4 if backward else 2) * self.hidden * DTYPE_BYTES[self.dtype]


class BenchPoint(NamedTuple):
    """One benchmark of a launch.

    Attributes:
        name: in the progress display, such as "tokens 2048, hidden 512".
        settings: all its settings.
    """

    name: str
    settings: Settings


def parse_settings(flags: Mapping[str, Any], world_size: int) -> Settings:
    """Check the flags of the command line against each other and against the launch.

    Args:
        flags: their texts by name, with underscores; None where not given.
        world_size: ranks of the launch.

    Raises:
        ValueError: a flag is wrong; names the flag, the value and the rule.
    """
    given = _read(flags)
    for name in ("experts", "top_k", "hidden", "tokens"):
        if given[name] is None:
            raise ValueError(f"{_flag(name)}: not given, must be an integer >= 1")
    given["etp"] = given["etp"] or given["tp"]
    given["ep"] = given["ep"] or max(world_size // given["etp"], 1)
    given["ffn_hidden"] = given["ffn_hidden"] or given["hidden"]
    # alltoall is the base of every ratio.
    given["stock"] = tuple(dict.fromkeys(("alltoall", *given["stock"])))
    are_all = ALL_CHAINS in given["chains"]
    if are_all:
        given["chains"] = (*CHAINS, AUTO)
    settings = Settings(
        num_experts=given.pop("experts"),
        topk=given.pop("top_k"),
        phases=given.pop("phase"),
        skip_incompatible=are_all,
        world_size=world_size,
        **given,
    )
    _check_together(settings)
    return settings


def _read(texts: Mapping[str, Any]) -> dict[str, Any]:
    """All flags' values, by name as in `texts`; None where neither text nor default gives one."""
    values: dict[str, Any] = {name: bool(texts.get(name)) for name in ("layer", "overlap_experts")}
    for name, flag in FLAGS.items():
        key = name.replace("-", "_")
        text = flag.default if texts.get(key) is None else str(texts[key])
        try:
            values[key] = None if text is None else flag.read(text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--{name}: {error}") from error
    return values


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
    if settings.tune_steps and AUTO not in settings.chains:
        raise ValueError(f"--tune-steps: got {settings.tune_steps}, must come with --chains auto")
    for name, value in (
        ("overlap_experts", settings.overlap_experts),
        ("expert_ms", settings.expert_ms),
    ):
        if value and not settings.layer:
            raise ValueError(f"{_flag(name)}: given, must come with --layer")
    if settings.overlap_experts and not settings.overlap_keys:
        raise ValueError(
            "--overlap-experts: given, must come with auto, or with a chain whose rows are tokens "
            "and with more than one chunk"
        )
    if settings.cluster is None and settings.inter_rate_ratio != 1:
        ratio = settings.inter_rate_ratio
        raise ValueError(f"--inter-rate-ratio: got {ratio:g}, must come with --cluster")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
