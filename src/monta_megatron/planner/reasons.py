"""The words of a search: why a chain was chosen, why the others were not, why none can be."""

from collections.abc import Sequence
from dataclasses import dataclass

from monta_megatron.common.quantities import gb_text
from monta_megatron.planner.chain_price import ChainPrice
from monta_megatron.planner.plan import Candidate


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a search came to.

    Attributes:
        choice: what was chosen.
        allowed: from what it was chosen, the fastest first.
        memory_limit_bytes: what was allowed to be held on a rank, or None.
        margin: the fraction by which a plainer chain was allowed to be slower.
    """

    choice: ChainPrice
    allowed: Sequence[ChainPrice]
    memory_limit_bytes: float | None
    margin: float

    def is_over_limit(self, price: ChainPrice) -> bool:
        """Whether something holds more than is allowed."""
        return self.memory_limit_bytes is not None and price.held_bytes > self.memory_limit_bytes

    @property
    def limit(self) -> str:
        """The limit as text."""
        return f"over the limit of {gb_text(self.memory_limit_bytes or 0.0)}"


def why_chosen(outcome: Outcome) -> str:
    """Why the choice is what it is."""
    choice, fastest = outcome.choice, outcome.allowed[0]
    others = [price for price in outcome.allowed if price.chain is not choice.chain]
    if fastest is not choice:
        how = (
            f"plainer than {fastest.name}, which is {_percent(choice, fastest)} faster, within the "
            f"margin of {outcome.margin:.0%}"
        )
    elif others:
        ratio = others[0].total_us / choice.total_us
        how = f"{ratio:.2f}x as fast as {others[0].name}, the next chain"
    else:
        how = "the only chain that can run"
    resource, busy_us = choice.busiest()
    share = busy_us / choice.total_us if choice.total_us > 0 else 0.0
    over = f"; {outcome.limit}" if outcome.is_over_limit(choice) else ""
    return f"{how}; the {resource} is busy for {share:.0%} of the time{over}"


def why_rejected(price: ChainPrice, plainest: ChainPrice, outcome: Outcome) -> str:
    """Why something that can run was not chosen.

    Args:
        price: what was not chosen.
        plainest: the plainest that does the same at this layout; the price itself if it is that.
        outcome: what the search came to.
    """
    choice = outcome.choice
    same = f"the same as {plainest.name} at this layout"
    if plainest is choice:
        return same
    if outcome.is_over_limit(price):
        return f"needs {gb_text(price.held_bytes)} on a rank, {outcome.limit}"
    if price.total_us == choice.total_us:
        return f"as fast as {choice.name}, which is plainer"
    if price.total_us < choice.total_us:
        return (
            f"{_percent(choice, price)} faster, within the margin of {outcome.margin:.0%} for a "
            "plainer chain"
        )
    resource, busy_us = price.busiest()
    why = f"{resource} {busy_us:,.0f} us" if price is plainest else same
    return f"{_percent(price, choice)} slower; {why}"


def why_none(
    prices: Sequence[ChainPrice], refused: Sequence[Candidate], memory_limit_bytes: float | None
) -> str:
    """Why there is nothing to choose from.

    Args:
        prices: what can run, all of it over the limit.
        refused: what cannot.
        memory_limit_bytes: the limit, or None.
    """
    if prices and memory_limit_bytes is not None:
        least = min(prices, key=lambda price: price.held_bytes)
        return (
            f"memory_limit: got {gb_text(memory_limit_bytes)}, must be at least "
            f"{gb_text(least.held_bytes)}, what {least.name} needs on a rank"
        )
    return "chains: none can run: " + "; ".join(
        f"{each.chain}: {each.rejected}" for each in refused
    )


def slowest_of(num_plans: int) -> str:
    """The note of a plan that stands for several."""
    return f"exchanges lie on the nodes in {num_plans} ways; this is the slowest of them"


def _percent(slower: ChainPrice, faster: ChainPrice) -> str:
    """1.234 times the time -> "23%", and "under 1%" instead of nothing."""
    ratio = slower.total_us / faster.total_us
    return f"{ratio - 1:.0%}" if ratio >= 1.01 else "under 1%"
