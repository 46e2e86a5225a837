"""The exchange's share of a measured iteration, and what a plan's choice would save of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.plan import Plan

STOCK = ("alltoall", "allgather", "flex")


@dataclass(frozen=True, kw_only=True)
class IterationShare:
    """A measured iteration, and the predicted exchange in it.

    Attributes:
        iteration_ms: measured.
        exchange_ms: predicted of what ran; None where that has no price, as `flex`.
        saved_ms: what the choice saves against what ran, or against plain `alltoall` where it is
            the choice that ran; below 0 where it is slower.
        ran: the dispatcher, or the chain, that ran.
        has_choice: whether the choice is what ran.
        is_lower_bound: whether a stage may have more MoE layers than are counted.
        overlaps: settings of the run that hide a part of the exchange.
    """

    iteration_ms: float
    exchange_ms: float | None
    saved_ms: float | None
    ran: str
    has_choice: bool
    is_lower_bound: bool
    overlaps: Sequence[str]

    @property
    def exchange_share(self) -> float | None:
        """Predicted exchange over the measured iteration."""
        return None if self.exchange_ms is None else self.exchange_ms / self.iteration_ms

    @property
    def saved_share(self) -> float | None:
        """Part that the choice saves of the iteration without it."""
        if self.saved_ms is None:
            return None
        return self.saved_ms / (self.iteration_ms + self.saved_ms * self.has_choice)

    def document(self) -> dict[str, Any]:
        """Fields of a JSON document."""
        return {
            "iteration_ms": self.iteration_ms,
            "exchange_share": self.exchange_share,
            "saved_share": self.saved_share,
        }

    @property
    def text(self) -> str:
        """Share and saving in a sentence each."""
        if self.exchange_ms is None or self.exchange_share is None or self.saved_share is None:
            return (
                f"{self.iteration_ms:,.0f} ms by {self.ran}, whose exchange has no price here; "
                "`monta compare` measures it beside the choice"
            )
        at_least = "at least " * self.is_lower_bound
        text = (
            f"{self.iteration_ms:,.0f} ms, of which the exchange by {self.ran} takes {at_least}"
            f"{self.exchange_share:.0%} ({self.exchange_ms:,.0f} ms, predicted)"
        )
        if self.exchange_share > 1:
            return f"{text}: the costs of this cluster are not those of the run"
        saved = f"{at_least}{self.saved_share:.0%}"
        if self.has_choice:
            text += f"; this choice saves {saved} against plain alltoall"
        else:
            text += f"; the choice would save {saved} of it"
        if self.overlaps:
            text += (
                f". {' and '.join(self.overlaps)}: part of the exchange is hidden already, so less "
                "is gained; `monta compare` measures it"
            )
        return text


def iteration_share(
    plan: Plan,
    benefit: Benefit | None,
    iteration_ms: float,
    ran: str = "alltoall",
    overlaps: Sequence[str] = (),
) -> IterationShare:
    """The share of a plan's exchange in an iteration.

    Args:
        plan: for the layout that ran.
        benefit: of the plan, with the exchanges of an iteration.
        iteration_ms: measured.
        ran: a dispatcher of stock's, "auto" or a chain of ours.
        overlaps: see `IterationShare`.

    Raises:
        ValueError: the exchanges of an iteration are not known.
    """
    iteration = None if benefit is None else benefit.iteration
    if (
        benefit is None
        or iteration is None
        or iteration.num_moe_layers is None
        or iteration.num_micro_batches is None
    ):
        raise ValueError(
            "--iteration-ms: given, must be with --global-batch-size and without --tokens 0: "
            "the exchanges of an iteration are not known"
        )
    times = iteration.num_moe_layers * iteration.num_micro_batches / 1e3
    chain = plan.chain if ran == "auto" else ran
    has_choice = ran not in STOCK and chain == plan.chain
    ran_us = {**plan.best_us(), "alltoall": benefit.alltoall_us}.get(chain)
    without_us = benefit.alltoall_us if has_choice else ran_us
    return IterationShare(
        iteration_ms=iteration_ms,
        exchange_ms=None if ran_us is None else ran_us * times,
        saved_ms=None if without_us is None else (without_us - benefit.chosen_us) * times,
        ran=chain,
        has_choice=has_choice,
        is_lower_bound=iteration.is_lower_bound,
        overlaps=overlaps,
    )
