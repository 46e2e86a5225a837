"""Benefit of a choice over stock `alltoall`, from predicted exchange times: numbers and a line.

2.16x stock alltoall: saves 3.6 ms x 94 MoE layers x 32 micro-batches = 10.8 s per iteration
(54% of the exchange's predicted time)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monta_megatron.common.units import counted, time_text


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Exchanges that an iteration waits for.

    A pipeline waits for the stage with the most MoE layers, once for every micro-batch. Its bubble,
    which shrinks too where the exchanges are shorter, is left out.

    Attributes:
        num_moe_layers: MoE layers of that stage; None where they are not known.
        is_lower_bound: whether that stage may have more MoE layers.
        num_stages: pipeline stages.
        num_micro_batches: None where the batch is not known.
    """

    num_moe_layers: int | None = None
    is_lower_bound: bool = False
    num_stages: int = 1
    num_micro_batches: int | None = None


@dataclass(frozen=True, kw_only=True)
class Benefit:
    """Two predicted times of the exchange of one MoE layer and micro-batch.

    Attributes:
        chain: the chosen one.
        chosen_us: its time.
        alltoall_us: that of plain `alltoall`, as stock runs it.
        why: the reason of the choice, if it is plain `alltoall` and another chain is faster.
        iteration: how often an iteration waits for it.
        ends: the same by the optimistic and by the conservative end of what was published; none
            where times were measured.
    """

    chain: str
    chosen_us: float
    alltoall_us: float
    why: str | None = None
    iteration: Iteration = Iteration()
    ends: tuple["Benefit", ...] = ()

    @property
    def ratio(self) -> float:
        """Speedup over stock."""
        return self.alltoall_us / self.chosen_us if self.chosen_us > 0 else 1.0

    @property
    def ratio_range(self) -> tuple[float, float] | None:
        """The least and the most of it; None where times were measured."""
        ratios = [self.ratio, *(end.ratio for end in self.ends)]
        return (min(ratios), max(ratios)) if self.ends else None

    @property
    def saved_us(self) -> float:
        """Below 0 where the choice, by hand or for its memory, is slower."""
        return self.alltoall_us - self.chosen_us

    @property
    def percent(self) -> float:
        """Saved share of stock's time."""
        return 100 * self.saved_us / self.alltoall_us if self.alltoall_us > 0 else 0.0

    def document(self) -> dict[str, Any]:
        """Fields of a JSON document; None for unknown values."""
        layers, micro_batches = self.iteration.num_moe_layers, self.iteration.num_micro_batches
        saved_s = None
        if layers is not None and micro_batches is not None:
            saved_s = self.saved_us * layers * micro_batches / 1e6
        return {
            "ratio": self.ratio,
            "ratio_range": self.ratio_range,
            "saved_us": self.saved_us,
            "moe_layers": layers,
            "moe_layers_is_lower_bound": self.iteration.is_lower_bound,
            "micro_batches": micro_batches,
            "saved_s_per_iteration": saved_s,
            "percent": self.percent,
            "text": self.text,
        }

    @property
    def text(self) -> str:
        """The line; factors that are not known are left out."""
        if self.chain == "alltoall":
            why = "the fastest here" if self.why is None else f"chosen here, {self.why}"
            return f"plain alltoall is {why}: no gain over stock"
        layers, micro_batches = self.iteration.num_moe_layers, self.iteration.num_micro_batches
        factors, total_us, per = [time_text(abs(self.saved_us))], abs(self.saved_us), []
        at_least = "at least " if self.iteration.is_lower_bound else ""
        if layers is None:
            per.append("MoE layer")
        else:
            of_stage = " of a pipeline stage" if self.iteration.num_stages > 1 else ""
            factors.append(at_least + counted(layers, "MoE layer") + of_stage)
            total_us *= layers
        if micro_batches is None:
            per.append("micro-batch")
        else:
            factors.append(counted(micro_batches, "micro-batch"))
            total_us *= micro_batches
        product = f" = {at_least}{time_text(total_us)}" if len(factors) > 1 else ""
        verb, share = ("saves", "of") if self.saved_us >= 0 else ("loses", "on top of")
        ends = self.ratio_range
        ratios = "" if ends is None else "; {:.2f}x to {:.2f}x".format(*ends)
        return (
            f"{self.ratio:.2f}x stock alltoall: {verb} {' x '.join(factors)}{product} per "
            f"{' and '.join(per) or 'iteration'} ({abs(self.percent):.0f}% {share} the exchange's "
            f"predicted time{ratios})"
        )


def benefit_of(
    chain: str, chosen_us: float | None, best_us: Mapping[str, float | None], reason: str
) -> Benefit | None:
    """Benefit of a choice; None where it or plain `alltoall` was not priced.

    Args:
        chain: the chosen one.
        chosen_us: its time.
        best_us: chain -> its time in its best number of chunks; None where it cannot run.
        reason: of the choice; only the part before a semicolon is used.
    """
    alltoall_us = best_us.get("alltoall")
    if chosen_us is None or alltoall_us is None:
        return None
    fastest_us = min(time_us for time_us in best_us.values() if time_us is not None)
    why = None if chosen_us <= fastest_us else reason.partition(";")[0]
    return Benefit(chain=chain, chosen_us=chosen_us, alltoall_us=alltoall_us, why=why)
