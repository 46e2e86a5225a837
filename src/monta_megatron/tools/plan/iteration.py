"""The exchange's share of a measured iteration, and what a plan's choice would save of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class IterationShare:
    """A measured iteration, and the predicted exchange in it.

    Attributes:
        iteration_ms: measured.
        exchange_ms: predicted of the dispatcher that ran.
        saved_ms: what the choice saves against plain `alltoall`; below 0 where it is slower.
        ran: the dispatcher, or the chain, that ran.
        has_choice: whether the choice is what ran.
        is_lower_bound: whether a stage may have more MoE layers than are counted.
        overlaps: settings of the run that hide a part of the exchange.
    """

    iteration_ms: float
    exchange_ms: float
    saved_ms: float
    ran: str
    has_choice: bool
    is_lower_bound: bool
    overlaps: Sequence[str]

    @property
    def exchange_share(self) -> float:
        """Predicted exchange over the measured iteration."""
        return self.exchange_ms / self.iteration_ms

    @property
    def saved_share(self) -> float:
        """Part of the iteration with `alltoall` that the choice saves."""
        with_alltoall_ms = self.iteration_ms + self.saved_ms * self.has_choice
        return self.saved_ms / with_alltoall_ms

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
        at_least = "at least " * self.is_lower_bound
        text = (
            f"{self.iteration_ms:,.0f} ms, of which the exchange by {self.ran} takes {at_least}"
            f"{self.exchange_share:.0%} ({self.exchange_ms:,.0f} ms, predicted)"
        )
        if self.exchange_share > 1:
            return f"{text}: the costs of this cluster are not those of the run"
        verb = "this choice saves" if self.has_choice else "the choice would save"
        text += f"; {verb} {at_least}{self.saved_share:.0%} of it against plain alltoall"
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
        ran: "alltoall" for stock's dispatchers, "auto" or a chain for ours.
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
            "--iteration-ms: given, must be with --global-batch-size and without --tokens 0 and "
            "--wire-dtype: the exchanges of an iteration are not known"
        )
    times = iteration.num_moe_layers * iteration.num_micro_batches / 1e3
    chain = plan.chain if ran == "auto" else ran
    of_chain_us = plan.best_us().get(chain)
    ran_us = benefit.alltoall_us if of_chain_us is None else of_chain_us
    return IterationShare(
        iteration_ms=iteration_ms,
        exchange_ms=ran_us * times,
        saved_ms=benefit.saved_us * times,
        ran=chain,
        has_choice=ran != "alltoall" and chain == plan.chain,
        is_lower_bound=iteration.is_lower_bound,
        overlaps=overlaps,
    )
