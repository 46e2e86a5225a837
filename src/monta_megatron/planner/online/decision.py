"""Decisions for a training iteration, from the iterations before it. No torch.

A decision is taken when an iteration has ended, from data that all ranks of the exchange share, and
so is the same on all of them. The traffic of an iteration and the times of its passes are known at
the end of the next one.

    the first          planned for the routing that is expected
    while tuning       from the second on: candidates of that plan, an iteration each
    after the tuning   the winner; on other traffic what is fastest by prediction times what the
                       tuning has measured over predicted
    without tuning     planned for the routing that was observed, from the third on

Notation: S = ranks of the exchange, P = passes of an iteration.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import CHAINS
from monta_megatron.common.rules import NonNegativeFloat, NonNegativeInt
from monta_megatron.common.units import counted
from monta_megatron.planner.chain_policy import ChainChoice, ChoiceTable, PlannedPolicy
from monta_megatron.planner.chain_price import ChainPrice
from monta_megatron.planner.routing.expected import Routing, UniformRouting
from monta_megatron.planner.routing.observed import (
    ObservedRouting,
    Traffic,
    expected_traffic,
    observed_routing,
)
from monta_megatron.planner.select import Selection

if TYPE_CHECKING:
    from monta_megatron.planner.online.drift import DriftMonitor, MeasuredIteration
    from monta_megatron.planner.online.tuning import Tuning, TuningCandidate


# By when the first iteration's traffic is known, and how often it is looked at from then on:
# planning takes tens of milliseconds.
FIRST_LOOK = 2
LOOK_EVERY = 20
# Overlapped computation that differs by more than this share is planned for anew; an exchange that
# is exposed by less than this share of its time is hidden as a whole.
DIFFERS = 0.2
FULLY_HIDDEN = 0.05


class Outcome(NamedTuple):
    """Figures of an iteration that all ranks know.

    Attributes:
        traffic: where its tokens went; None if it had none.
        pass_us: [S, P] the time of each pass; P is 0 where none was timed. Where it was
            watched, the argument of `DriftMonitor.learn`.
        exposed_us: [S] their exposed part; `NOT_TIMED_US` where no computation overlaps them.
    """

    traffic: Traffic | None
    pass_us: NDArray[np.int64]
    exposed_us: NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True)
class DecisionState:
    """State restored on resume; see `Decision`."""

    number: NonNegativeInt
    num_averaged: NonNegativeInt
    pairs: tuple[float, ...]
    rank_hits: tuple[float, ...]
    node_hits: tuple[float, ...]
    routing: ObservedRouting | None
    tuning: Any
    tuned_for: tuple[int, int] | None
    tuned_routing: ObservedRouting | None
    rate_ratios: tuple[float, ...] = ()
    overlapped_compute_us: NonNegativeFloat = 0.0


class Decision:
    """Decision for the iteration under way.

    Args:
        policy: plans for a routing.
        num_tuning_steps: iterations in which candidates take turns; 0 for none.
        watching: notices changes of the links; None where nothing is watched.

    Attributes:
        number: of the iteration, from 0.
        routing: for which is planned.
        tuning: what was measured; None before it begins.
        overlapped_compute_us: computation that hides the exchange of a layer and micro-batch:
            stated by the user, or measured.
    """

    def __init__(
        self,
        policy: PlannedPolicy,
        num_tuning_steps: int = 0,
        watching: "DriftMonitor | None" = None,
    ) -> None:
        self.number = 0
        self.routing: Routing = policy.workload.routing
        self.tuning: Tuning | None = None
        self.watching = watching
        self.overlapped_compute_us = policy.overlapped_compute_us
        # As it was given, and with what has been noticed since.
        self._given_policy = self._policy = policy
        self._num_tuning_steps = num_tuning_steps
        self._average: Traffic | None = None
        self._num_averaged = 0
        # The candidates of the iterations whose outcomes are not known yet.
        self._turns: deque[int | None] = deque([None])
        # Largest numbers of tokens and experts of the tuning's selection, and its routing.
        self._tuned_for: tuple[int, int] | None = None
        self._tuned_routing: Routing | None = None
        self._table = policy.table(self.routing)
        # Until the tuning begins: by the table, and largest numbers of tokens and experts.
        self._candidates: dict[
            tuple[ChoiceTable, tuple[int, int]], tuple[TuningCandidate, ...]
        ] = {}

    @property
    def is_timed(self) -> bool:
        """Whether the passes of this iteration are to be timed."""
        return self._turns[-1] is not None or self.is_watched

    @property
    def is_watched(self) -> bool:
        """Whether they are to be timed for the `watching`."""
        return self.watching is not None and self.watching.is_on

    @property
    def has_to_settle(self) -> bool:
        """Whether the tuning is over, all of it is known, and `settle` was not called."""
        tuning = self.tuning
        return (
            tuning is not None
            and len(tuning.steps) == self._num_tuning_steps
            and tuning.settled_us is None
        )

    def agreed_config(self) -> dict[str, Any]:
        """Values that all ranks of the exchange agree on in this iteration."""
        tuning = self.tuning
        return {
            "iteration": self.number,
            "routing": repr(self.routing),
            "candidate": self._turns[-1],
            "tuned": None if tuning is None else [len(tuning.steps), tuning.settled_us],
            "costs": self._policy.cluster.name,
            "overlapped_compute_us": round(self.overlapped_compute_us),
            "watched": self.is_watched,
        }

    def choose(self, max_tokens: int, max_experts_per_token: int = 0) -> ChainChoice:
        """Choose chain and chunks; see `ChainPolicy`. While tuning it gives no reason."""
        tuning = self.tuning
        limited = self._policy.memory_limit_bytes is not None
        if (
            tuning is None
            or tuning.settled_us is not None
            # Candidates keep the limit for so many tokens.
            or (limited and self._table.key(max_tokens, max_experts_per_token) != self._tuned_for)
        ):
            return self._table.choose(max_tokens, max_experts_per_token)
        turn = self._turns[-1]
        candidate = tuning.candidates[tuning.winner if turn is None else turn]
        return ChainChoice(
            chain=CHAINS[candidate.chain], num_chunks=candidate.num_chunks, reason=""
        )

    def candidates(
        self, max_tokens: int, max_experts_per_token: int = 0
    ) -> "tuple[TuningCandidate, ...]":
        """Candidates of the tuning under way, or of one that begins with so many tokens.

        See `ChainPolicy.choose`. None where there is no tuning, or no longer.
        """
        if self.tuning is not None:
            return self.tuning.candidates if self._is_tuning else ()
        if not self._num_tuning_steps:
            return ()
        from monta_megatron.planner.online.tuning import tuning_candidates

        key = self._table.key(max_tokens, max_experts_per_token)
        if (self._table, key) not in self._candidates:
            selection = self._policy.selection(*key, self.routing)
            self._candidates[self._table, key] = tuning_candidates(selection)
        return self._candidates[self._table, key]

    def end_iteration(
        self, outcome: Outcome | None, max_tokens: int, max_experts_per_token: int
    ) -> None:
        """Decide on the next iteration.

        Args:
            outcome: of the iteration before the one that has ended; None if it is not known.
            max_tokens: the most tokens of any rank in the one that has ended.
            max_experts_per_token: the most experts of a token in it.
        """
        watching = self.watching
        if watching is not None:
            ran = self.choose(max_tokens, max_experts_per_token)
            key = self._table.key(max_tokens, max_experts_per_token)
            watching.end(ran, key, self.routing)
        if outcome is not None:
            self._learn(outcome)
        self.number += 1
        if self.number % LOOK_EVERY == FIRST_LOOK:
            self._look()
        if self.tuning is None and self._num_tuning_steps:
            self._start_tuning(max_tokens, max_experts_per_token)
        self._turns.append(None if self.tuning is None else self.tuning.next())
        if watching is not None:
            watching.begin(self.number, free=not self._is_tuning)

    def settle(self, summaries: Sequence[Sequence[int]]) -> Selection:
        """End the tuning together with the replicas of the exchange; see `Tuning.settle`.

        Returns:
            From what the winner was chosen, priced for the routing that was observed meanwhile.
        """
        tuning = self.tuning
        assert tuning is not None and self._tuned_for is not None
        tuning.settle(summaries)
        if tuning.measures_exposed:
            self.overlapped_compute_us = tuning.hidden_us
            self._plan_again()
        self._look()
        self._tuned_routing = self.routing
        selection = self._policy.selection(*self._tuned_for, self.routing)
        prices = {(price.chain.name, price.num_chunks): price for price in selection.prices}
        # Measured over predicted is what a chain is worth, whatever the routing.
        tuning.candidates = tuple(
            replace(candidate, predicted_us=prices[candidate.key].total_us)
            for candidate in tuning.candidates
        )
        self._table = self._make_table()
        return selection

    def state(self) -> DecisionState:
        """State for `resume`."""
        average, watching = self._average, self.watching
        figures = {} if average is None else vars(average)
        return DecisionState(
            number=self.number,
            num_averaged=self._num_averaged,
            **{
                name: tuple(figures.get(name, np.empty(0)).tolist())
                for name in ("pairs", "rank_hits", "node_hits")
            },
            routing=_if_observed(self.routing),
            tuning=None if self.tuning is None else self.tuning.state(),
            tuned_for=self._tuned_for,
            tuned_routing=_if_observed(self._tuned_routing),
            rate_ratios=() if watching is None else tuple(watching.rate_ratios.values()),
            overlapped_compute_us=self.overlapped_compute_us,
        )

    def beginning(self) -> "Decision":
        """Decision of the first iteration, with the same policy and tuning; it watches nothing."""
        return Decision(self._given_policy, self._num_tuning_steps)

    def resume(self, state: DecisionState) -> None:
        """Go on where a state was taken; outcomes that were not known then are lost.

        Raises:
            ValueError: it is of another tuning.
        """
        tuning = None
        if state.tuning is not None:
            from monta_megatron.planner.online.tuning_report import resumed

            names = [chain.name for chain in self._policy.chains]
            tuning = resumed(state.tuning, self._num_tuning_steps, names)
        self.number, self._num_averaged = state.number, state.num_averaged
        if state.num_averaged:
            self._average = Traffic(
                pairs=np.array(state.pairs),
                rank_hits=np.array(state.rank_hits),
                node_hits=np.array(state.node_hits),
            )
        expected = self._policy.workload.routing
        self.routing = state.routing or expected
        self._tuned_routing = state.tuned_routing or expected
        self.tuning, self._tuned_for = tuning, state.tuned_for
        self._turns = deque([None if tuning is None else tuning.next()])
        if not self._given_policy.overlapped_compute_us:
            self.overlapped_compute_us = state.overlapped_compute_us
        if self.watching is not None:
            self.watching.restart(state.number, state.rate_ratios)
        self._plan_again()
        self._table = self._make_table()

    def _learn(self, outcome: Outcome) -> None:
        turn = self._turns.popleft()
        # An overlap that the user states is not measured.
        is_stated = self._given_policy.overlapped_compute_us > 0
        exposed_us = None if is_stated else outcome.exposed_us
        if turn is not None and self.tuning is not None:
            self.tuning.add(turn, outcome.pass_us, exposed_us)
        if self.watching is not None:
            before = self.watching.latest
            self.watching.learn(outcome.pass_us, self._policy, exposed_us)
            latest = self.watching.latest
            if latest is before:
                latest = None
            if self._learn_overlap(latest) or self.watching.change is not None:
                self._plan_again()
        if outcome.traffic is not None:
            average = self._average or outcome.traffic
            self._average = average.averaged(outcome.traffic, self._num_averaged)
            self._num_averaged += 1

    def _learn_overlap(self, watched: "MeasuredIteration | None") -> bool:
        """Update `overlapped_compute_us`; False where it stays about the same."""
        if watched is None or watched.hidden_us is None:
            return False
        hidden_us = watched.hidden_us
        if watched.exposed_share < FULLY_HIDDEN:
            # Computation that goes on for longer hides a longer exchange as well.
            hidden_us = max(hidden_us, self.overlapped_compute_us)
        if abs(hidden_us - self.overlapped_compute_us) <= DIFFERS * self.overlapped_compute_us:
            return False
        self.overlapped_compute_us = hidden_us
        return True

    def _look(self) -> None:
        """Plan for the routing that was observed, if it is another one."""
        if self._average is None or self._is_tuning:
            return
        layout, expected = self._policy.workload.layout, self._policy.workload.routing
        assert isinstance(expected, UniformRouting), "what the configuration expects"
        seen = observed_routing(self._average, layout, expected.topk)
        usual = observed_routing(
            expected_traffic(expected, layout, self._average), layout, expected.topk
        )
        now = self.routing if isinstance(self.routing, ObservedRouting) else usual
        if seen.differs(now):
            self.routing = seen if seen.differs(usual) else expected
            self._table = self._make_table()

    def _plan_again(self) -> None:
        """Plan with the rates of the links and the overlap that were measured."""
        from monta_megatron.planner.online.drift import replanned

        ratios = {} if self.watching is None else self.watching.rate_ratios
        self._policy = replanned(self._given_policy, ratios, self.overlapped_compute_us)
        self._table = self._make_table()

    @property
    def _is_tuning(self) -> bool:
        return self.tuning is not None and self.tuning.settled_us is None

    def _start_tuning(self, max_tokens: int, max_experts_per_token: int) -> None:
        from monta_megatron.planner.online.tuning import Tuning

        self._tuned_for = self._table.key(max_tokens, max_experts_per_token)
        candidates = self.candidates(max_tokens, max_experts_per_token)
        self.tuning = Tuning(candidates=candidates, num_steps=self._num_tuning_steps)
        self._candidates.clear()

    def _make_table(self) -> ChoiceTable:
        tuning = self.tuning
        if tuning is None or tuning.settled_us is None:
            return self._policy.table(self.routing)
        return ChoiceTable(policy=self._policy, routing=self.routing, pick=self._pick_tuned)

    def _pick_tuned(self, selection: Selection) -> tuple[ChainPrice, str]:
        """Choice after the tuning, and its reason."""
        tuning = self.tuning
        assert tuning is not None
        winner = tuning.candidates[tuning.winner].key
        workload = selection.workload
        is_same = (
            self._policy.cluster is self._given_policy.cluster
            and workload.routing == self._tuned_routing
            and (workload.tokens_per_rank, workload.max_experts_per_token) == self._tuned_for
        )
        prices = {(price.chain.name, price.num_chunks): price for price in selection.allowed}
        over = f"measured over {counted(tuning.num_steps, 'iteration')}"
        if is_same and winner in prices:
            return prices[winner], over
        return tuning.select(selection.allowed, winner), f"by prediction times what was {over}"


def _if_observed(routing: Routing | None) -> ObservedRouting | None:
    """None for the routing that is expected."""
    return routing if isinstance(routing, ObservedRouting) else None
