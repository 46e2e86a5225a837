"""Benefit of a choice over stock `alltoall`, and its share of a measured iteration.

2.16x stock alltoall: saves 3.6 ms x 24 MoE layers of a stage x 32 micro-batches = 2.76 s per
iteration
"""

from dataclasses import asdict, dataclass
from typing import Any

from monta_megatron.common.rules import require
from monta_megatron.common.text import counted, time_text


@dataclass(frozen=True, kw_only=True)
class Benefit:
    """Two predicted times of the exchange of one MoE layer and micro-batch.

    A pipeline waits for the stage with the most MoE layers, once for every micro-batch. Its bubble,
    which shrinks too where the exchanges are shorter, is left out.

    Attributes:
        chain: the chosen one.
        chosen_us: its time.
        alltoall_us: that of plain `alltoall`, as stock runs it.
        ratio_range: the least and the most of `ratio`, by the ends of what was published; None
            where times were measured.
        num_moe_layers: MoE layers of that stage; None where they are not known.
        num_micro_batches: of an iteration; None where the batch is not known.
    """

    chain: str
    chosen_us: float
    alltoall_us: float
    ratio_range: tuple[float, float] | None = None
    num_moe_layers: int | None = None
    num_micro_batches: int | None = None

    @property
    def ratio(self) -> float:
        """Speedup over stock."""
        return self.alltoall_us / self.chosen_us if self.chosen_us > 0 else 1.0

    @property
    def saved_us(self) -> float:
        """Below 0 where the choice, by hand or for its memory, is slower."""
        return self.alltoall_us - self.chosen_us

    @property
    def per_iteration(self) -> int | None:
        """Exchanges that an iteration waits for; None where that is not known."""
        layers, micro_batches = self.num_moe_layers, self.num_micro_batches
        return None if layers is None or micro_batches is None else layers * micro_batches

    def document(self) -> dict[str, Any]:
        """Fields of a JSON document; None for unknown values."""
        times = self.per_iteration
        return {
            **asdict(self),
            "ratio": self.ratio,
            "saved_us": self.saved_us,
            "saved_s_per_iteration": None if times is None else self.saved_us * times / 1e6,
            "text": self.text,
        }

    @property
    def text(self) -> str:
        """The line; factors that are not known are left out."""
        if self.chain == "alltoall":
            return "plain alltoall is chosen: no gain over stock"
        total_us = abs(self.saved_us)
        factors, per = [time_text(total_us)], []
        for number, noun, behind in (
            (self.num_moe_layers, "MoE layer", " of a stage"),
            (self.num_micro_batches, "micro-batch", ""),
        ):
            if number is None:
                per.append(noun)
            else:
                factors.append(counted(number, noun) + behind)
                total_us *= number
        product = f" = {time_text(total_us)}" if len(factors) > 1 else ""
        ends = "" if self.ratio_range is None else " ({:.2f}x to {:.2f}x)".format(*self.ratio_range)
        return (
            f"{self.ratio:.2f}x stock alltoall{ends}: {'saves' if self.saved_us >= 0 else 'loses'} "
            f"{' x '.join(factors)}{product} per {' and '.join(per) or 'iteration'}"
        )


@dataclass(frozen=True)
class IterationShare:
    """The predicted exchange in a measured iteration.

    Attributes:
        iteration_ms: measured.
        ran: the dispatcher of Megatron that ran.
        exchange_share: of the iteration; None where what ran has no price.
        saved_share: what the choice saves of the iteration; below 0 where it is slower.
    """

    iteration_ms: float
    ran: str
    exchange_share: float | None = None
    saved_share: float | None = None

    @property
    def text(self) -> str:
        """Both in a sentence."""
        text = f"{self.iteration_ms:,.0f} ms by {self.ran}, "
        if self.exchange_share is None:
            return f"{text}whose exchange has no price here; `monta compare` measures it"
        text += f"of which the exchange takes {self.exchange_share:.0%} (predicted)"
        if self.exchange_share > 1:
            return f"{text}: the costs of this cluster are not those of the run"
        return f"{text}; this choice saves {self.saved_share:.0%} of it"


def share_of(
    iteration_ms: float, ran: str, ran_us: float | None, benefit: Benefit
) -> IterationShare:
    """The share of a plan's exchange in an iteration.

    Args:
        iteration_ms: measured.
        ran: the dispatcher of Megatron that ran.
        ran_us: its time; None for `flex`, which has no price, and for ours, whose log says what it
            measured.
        benefit: of the plan.

    Raises:
        ValueError: the exchanges of an iteration are not known.
    """
    times = benefit.per_iteration
    rule = "be beside --global-batch-size, which says how many exchanges an iteration has"
    require(times is not None, "--iteration-ms", f"{iteration_ms:g}", rule)
    if ran_us is None or times is None:
        return IterationShare(iteration_ms, ran)
    of_iteration = times / 1e3 / iteration_ms
    saved_us = ran_us - benefit.chosen_us
    return IterationShare(iteration_ms, ran, ran_us * of_iteration, saved_us * of_iteration)
