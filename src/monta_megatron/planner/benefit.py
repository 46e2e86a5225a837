"""What a plan gains over stock: per exchange, per iteration, and as a share of a measured one."""

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from monta_megatron.common.errors import UserError
from monta_megatron.common.text import counted, time_text
from monta_megatron.core import Choice
from monta_megatron.planner.plan import Plan
from monta_megatron.planner.training import STOCK_DISPATCHERS, Training


@dataclass(frozen=True, kw_only=True)
class Benefit:
    """Benefit of our best chain over the faster stock dispatcher, per MoE layer and micro-batch.

    A pipeline waits for the stage with the most MoE layers, once for every micro-batch. Its bubble,
    which shrinks too where the exchanges are shorter, is left out.

    Attributes:
        chain: the best chain of ours.
        num_chunks: number of its chunks.
        chosen_us: time of that chain.
        stock: the faster dispatcher of stock.
        stock_us: time of that dispatcher.
        ratio_range: smallest and largest speedup, as in `Plan`; None without ranges.
        hidden_behind: the work that already hides a part of the exchange; None if nothing does.
        not_stated: the reason why no benefit is stated; None where one is.
        num_moe_layers: number of MoE layers of that stage; None where it is not known.
        num_micro_batches: number of micro-batches per iteration; None where the batch is not known.
    """

    chain: str
    num_chunks: int
    chosen_us: float
    stock: str
    stock_us: float
    ratio_range: tuple[float, float] | None = None
    hidden_behind: str | None = None
    not_stated: str | None = None
    num_moe_layers: int | None = None
    num_micro_batches: int | None = None

    @property
    def ratio(self) -> float:
        """Speedup over stock."""
        return self.stock_us / self.chosen_us

    @property
    def saved_us(self) -> float:
        """Time saved; below 0 where stock is faster."""
        return self.stock_us - self.chosen_us

    @property
    def per_iteration(self) -> int | None:
        """Exchanges that an iteration waits for; None where that is not known."""
        layers, micro_batches = self.num_moe_layers, self.num_micro_batches
        return None if layers is None or micro_batches is None else layers * micro_batches

    def document(self) -> dict[str, Any] | None:
        """Fields of a JSON document, with None for unknown values; None where none is stated."""
        if self.not_stated is not None:
            return None
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
        if self.not_stated is not None:
            return self.not_stated
        ends = "" if self.ratio_range is None else " ({:.2f}x to {:.2f}x)".format(*self.ratio_range)
        if self.saved_us <= 0:
            ours = Choice(chain=self.chain, num_chunks=self.num_chunks).name
            return (
                f"none: stock {self.stock} takes {self.stock_us:,.0f} us; the best of monta, "
                f"{ours}, takes {self.chosen_us:,.0f} us and is {self.ratio:.2f}x{ends} as fast"
            )
        parts = (
            (self.num_moe_layers, "MoE layer", " of a stage"),
            (self.num_micro_batches, "micro-batch", ""),
        )
        known = [(number, noun, suffix) for number, noun, suffix in parts if number is not None]
        per = [noun for number, noun, _ in parts if number is None]
        factors = [time_text(self.saved_us)]
        factors += (counted(number, noun) + suffix for number, noun, suffix in known)
        total_us = self.saved_us * prod(number for number, *_ in known)
        product = f" = {time_text(total_us)}" if len(factors) > 1 else ""
        at_most = "" if self.hidden_behind is None else "at most "
        return (
            f"{self.ratio:.2f}x stock {self.stock}, {self.stock_us:,.0f} us{ends}: "
            f"saves {at_most}{' x '.join(factors)}{product} per {' and '.join(per) or 'iteration'}"
        )


def benefit_of(
    plan: Plan,
    training: Training,
    num_moe_layers: int | None = None,
    num_micro_batches: int | None = None,
) -> Benefit:
    """The benefit of a plan for a training; see `Benefit`."""
    not_stated = None
    if training.refuses_monta is not None:
        not_stated = f"none: this training refuses monta ({training.refuses_monta})"
    elif training.dispatcher not in (None, "monta", *STOCK_DISPATCHERS):
        not_stated = (
            f"not predicted: {training.dispatcher} runs, which has no price here; `monta compare` "
            "measures both"
        )
    return Benefit(
        chain=plan.chain,
        num_chunks=plan.num_chunks,
        chosen_us=plan.predicted_us,
        stock=plan.stock,
        stock_us=plan.stock_us,
        ratio_range=plan.ratio_range,
        hidden_behind=training.hidden_behind,
        not_stated=not_stated,
        num_moe_layers=num_moe_layers,
        num_micro_batches=num_micro_batches,
    )


@dataclass(frozen=True)
class IterationShare:
    """The predicted exchange in a measured iteration.

    Attributes:
        iteration_ms: measured time of an iteration.
        ran: the dispatcher of Megatron that ran.
        exchange_share: share of the iteration that the exchange takes; None where the dispatcher
            that ran has no price.
        saved_share: share of the iteration that the recommended dispatcher saves; 0 where it ran.
        hidden_behind: the work that hides a part of the exchange; None if nothing does.
    """

    iteration_ms: float
    ran: str
    exchange_share: float | None = None
    saved_share: float | None = None
    hidden_behind: str | None = None

    @property
    def text(self) -> str:
        """Both shares in a sentence."""
        text = f"{self.iteration_ms:,.0f} ms by {self.ran}, "
        if self.exchange_share is None or self.saved_share is None:
            return f"{text}whose exchange has no price here; `monta compare` measures it"
        if self.hidden_behind is None:
            text += f"of which the exchange takes {self.exchange_share:.0%} (predicted)"
        else:
            text += (
                f"whose exchange takes as long as {self.exchange_share:.0%} of it (predicted), a "
                f"part of which {self.hidden_behind} hides"
            )
        if self.exchange_share > 1:
            return f"{text}: the costs of this cluster are not those of the run"
        if round(self.saved_share, 2) == 0:
            return f"{text}; there is nothing to save"
        at_most = "" if self.hidden_behind is None else "at most "
        return f"{text}; this choice saves {at_most}{self.saved_share:.0%} of it"


def share_of(iteration_ms: float, ran: str, plan: Plan, benefit: Benefit) -> IterationShare:
    """The share of a plan's exchange in an iteration.

    Args:
        iteration_ms: measured time of an iteration.
        ran: the dispatcher of Megatron that ran; `flex` has no price, nor has ours, whose log says
            what it measured.
        plan: the plan of the training's exchange.
        benefit: the benefit of that plan.

    Raises:
        UserError: the exchanges of an iteration are not known.
    """
    times = benefit.per_iteration
    if times is None:
        raise UserError(
            "--global-batch-size: not given, must be: it says how many exchanges an iteration has"
        )
    if (ran_us := plan.stock_times_us.get(ran)) is None:
        return IterationShare(iteration_ms, ran)
    per_iteration = times / 1e3 / iteration_ms
    return IterationShare(
        iteration_ms,
        ran,
        exchange_share=ran_us * per_iteration,
        saved_share=(ran_us - plan.recommended_us) * per_iteration,
        hidden_behind=benefit.hidden_behind,
    )
