"""Figures and findings of `monta doctor --run`: plain numbers, texts, and shared wording."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from monta_megatron.common.text import shown
from monta_megatron.common.units import counted, time_text
from monta_megatron.planner.chain_price import RESOURCE_NAMES
from monta_megatron.planner.online.drift import Change
from monta_megatron.planner.select import MARGIN

Kind = Literal["measured", "predicted"]


@dataclass(frozen=True, kw_only=True)
class ExchangeFigures:
    """Times of an exchange: medians of watched iterations, or a prediction.

    Attributes:
        kind: which of the two.
        basis: the file, and which iterations.
        chain: that runs.
        num_chunks: in how many chunks.
        of_iteration: whether the times are those of all layers and micro-batches of an iteration;
            else of one, as in a plan.
        exchange_ms: its time, measured or predicted as `kind` says.
        predicted_ms: its predicted time.
        busy_ms: "inter", "intra", "memory", "host" -> predicted time of each alone.
        link_ms: "inter", "intra" -> measured time of the collectives there; empty if predicted.
        link_over_predicted: likewise, measured over predicted.
        calibrated_links: those whose prediction says how fast they should be.
        avg_overload_factor: rows of the most loaded rank over those of a balanced one; None if
            predicted.
        max_overload_factor: likewise, the largest of all iterations, layers and micro-batches.
        imbalance: by how much the exchange takes longer on the rank that waits most; or None.
        slowest_ranks: rank of the job -> the part of the iterations in which others wait for it.
    """

    kind: Kind
    basis: str
    chain: str
    num_chunks: int
    of_iteration: bool = True
    exchange_ms: float
    predicted_ms: float
    busy_ms: Mapping[str, float]
    link_ms: Mapping[str, float] = field(default_factory=dict)
    link_over_predicted: Mapping[str, float] = field(default_factory=dict)
    calibrated_links: tuple[str, ...] = ()
    avg_overload_factor: float | None = None
    max_overload_factor: float | None = None
    imbalance: float | None = None
    slowest_ranks: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LinkChange:
    """A change of a link that is still in force.

    Attributes:
        change: the change noticed.
        basis: the file, and the iteration.
    """

    change: Change
    basis: str


@dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """Memory of a rank.

    Attributes:
        out_of_memory: the line of the log that says that a rank had too little; or None.
        basis: the files that the figures come from.
        allocated_bytes: the most that a rank had allocated, as Megatron logged it; or None.
        rank_bytes: what a rank may use, by the cluster file; or None.
        exchange_bytes: predicted peak of the exchange on a rank; or None.
        limit_bytes: that of --moe-monta-memory-limit-gb; or None.
    """

    out_of_memory: str | None = None
    basis: str = ""
    allocated_bytes: float | None = None
    rank_bytes: float | None = None
    exchange_bytes: float | None = None
    limit_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chain in a number of chunks, and its predicted time in a layer and micro-batch.

    Attributes:
        chain: its name.
        num_chunks: its number of chunks.
        us: dispatch and combine, forward and backward; of the layer where its experts count.
        peak_bytes: what it holds on a rank.
    """

    chain: str
    num_chunks: int
    us: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Predictions of other choices, for the model's own router.

    Attributes:
        basis: the files that it rests on.
        ran: that ran.
        fastest: what `auto` would choose of all chains without a limit on memory.
        eight_bits: what ran, with tokens in eight bits; None where they are so already.
        experts_us: the experts of a layer and micro-batch, forward and backward.
        unsplit: the fastest layer whose experts run in one piece.
        split: the fastest whose experts run in the pipeline; None where none can.
        is_named: whether a flag or a plan names the chain, or its number of chunks.
        experts_asked: whether --moe-monta-overlap-experts is given.
        experts_pipelined: whether the experts ran in the pipeline.
    """

    basis: str
    ran: Choice
    fastest: Choice
    eight_bits: Choice | None
    experts_us: float
    unsplit: Choice
    split: Choice | None
    is_named: bool
    experts_asked: bool
    experts_pipelined: bool


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """All that is known of a run.

    Attributes:
        exchange: of its slowest exchange; None where only logs are there.
        iteration_ms: a whole iteration, measured, by Megatron's log; None where that is not there.
        changes: of the links of all exchanges.
        memory: of a rank.
        what_if: predictions of other choices; None without model and cluster.
        notes: what is not known, and what would tell it.
    """

    exchange: ExchangeFigures | None
    iteration_ms: float | None
    changes: tuple[LinkChange, ...] = ()
    memory: MemoryFigures = MemoryFigures()
    what_if: WhatIf | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that holds a run back.

    Attributes:
        name: which rule found it.
        kind: whether the time that it holds is measured or predicted.
        held_ms: the most that the exchange's time, or the wait for it, would be shorter without it;
            None where the run may have ended of it, 0 where it is only worth knowing.
        says: what it is, with its figures.
        rests_on: the files and iterations.
        advice: what to try, the most promising first.
    """

    name: str
    kind: Kind
    held_ms: float | None
    says: str
    rests_on: str
    advice: tuple[str, ...]


PLACE = "monta place: experts on ranks by a trace of the router"
NAMES = {**RESOURCE_NAMES, "memory": "copies in memory", "host": "host"}


def wrapped(words: str, width: int, first: str = "", *, break_words: bool = False) -> list[str]:
    """Lines of at most `width` characters, the others indented as deep as `first` is long."""
    return textwrap.wrap(
        shown(words),
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=break_words,
    )


def of_exchange_ms(run: RunFigures, part: float) -> float | None:
    """A part of the exchange's predicted time, of the time that it takes."""
    return None if run.exchange is None else part * run.exchange.exchange_ms


def named(choice: Choice) -> str:
    """A chain in its chunks."""
    return f"{choice.chain} in {counted(choice.num_chunks, 'chunk')}"


def less_time(choice: Choice, ran: Choice) -> str:
    """Time by which a choice is faster than the run's."""
    return f"{1 - choice.us / ran.us:.0%} less time, predicted"


def each_alone(of: ExchangeFigures) -> str:
    """Predicted busy time of each resource."""
    longest_us = 1e3 * max(of.busy_ms.values(), default=0.0)
    parts = (
        f"{NAMES[resource]} {time_text(1e3 * ms, longest_us)}"
        for resource, ms in of.busy_ms.items()
    )
    return f"predicted of each alone: {', '.join(parts)}"


def faster_chain(what_if: WhatIf | None) -> Iterator[str]:
    """The chain that is predicted to be faster than one that was named."""
    if what_if is None:
        yield "monta plan with model, cluster and layout: what each chain would take"
    elif what_if.is_named and what_if.fastest.us < what_if.ran.us * (1 - MARGIN):
        fastest = what_if.fastest
        yield f"--moe-monta-chain auto: {named(fastest)} takes {less_time(fastest, what_if.ran)}"


def eight_bits(what_if: WhatIf | None) -> Iterator[str]:
    """Tokens in eight bits, where they are predicted to pay."""
    other = None if what_if is None else what_if.eight_bits
    if what_if is not None and other is not None and other.us < what_if.ran.us * (1 - MARGIN):
        less = less_time(other, what_if.ran)
        yield f"--moe-monta-wire-dtype fp8: {less}; it rounds what the experts get"
