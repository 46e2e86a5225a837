"""Decisions for a training iteration, from the iterations before it. No torch.

A decision is taken when an iteration has ended, from data that all ranks of the exchange share, and
so is the same on all of them. The times of an iteration's passes are known at the end of the next
one.

    the first          planned
    while tuning       from the second on: candidates of that plan, an iteration each
    after the tuning   the winner; for other numbers of tokens what is fastest by prediction times
                       what the tuning has measured over predicted

Notation: S = ranks of the exchange, P = passes of an iteration.
"""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import CHAINS
from monta_megatron.common.units import counted
from monta_megatron.planner.chain_policy import ChainChoice, ChoiceTable, PlannedPolicy
from monta_megatron.planner.chain_price import ChainPrice
from monta_megatron.planner.select import Selection

if TYPE_CHECKING:
    from monta_megatron.planner.online.tuning import Tuning, TuningCandidate


class Decision:
    """Decision for the iteration under way.

    Args:
        policy: plans for a number of tokens.
        num_tuning_steps: iterations in which candidates take turns; 0 for none.

    Attributes:
        number: of the iteration, from 0.
        tuning: what was measured; None before it begins.
    """

    def __init__(self, policy: PlannedPolicy, num_tuning_steps: int = 0) -> None:
        self.number = 0
        self.tuning: Tuning | None = None
        self._policy = policy
        self._num_tuning_steps = num_tuning_steps
        # The candidates of the iterations whose times are not known yet.
        self._turns: deque[int | None] = deque([None])
        # Largest numbers of tokens and experts of the tuning's selection.
        self._tuned_for: tuple[int, int] | None = None
        self._table = policy.table
        # Until the tuning begins: by largest numbers of tokens and experts.
        self._candidates: dict[tuple[int, int], tuple[TuningCandidate, ...]] = {}

    @property
    def is_timed(self) -> bool:
        """Whether the passes of this iteration are to be timed."""
        return self._turns[-1] is not None

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to measure."""
        settled = self.tuning is not None and self.tuning.settled_us is not None
        return settled or not self._num_tuning_steps

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
            "candidate": self._turns[-1],
            "tuned": None if tuning is None else [len(tuning.steps), tuning.settled_us],
        }

    def choose(self, max_tokens: int, max_experts_per_token: int = 0) -> ChainChoice:
        """Choose chain and chunks; see `ChainPolicy`. While tuning it gives no reason."""
        tuning = self.tuning
        if tuning is None or tuning.settled_us is not None:
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
        if self.is_settled:
            return ()
        if self.tuning is not None:
            return self.tuning.candidates
        from monta_megatron.planner.online.tuning import tuning_candidates

        key = self._table.key(max_tokens, max_experts_per_token)
        if key not in self._candidates:
            self._candidates[key] = tuning_candidates(self._policy.selection(*key))
        return self._candidates[key]

    def end_iteration(
        self, pass_us: NDArray[np.int64] | None, max_tokens: int, max_experts_per_token: int
    ) -> None:
        """Decide on the next iteration.

        Args:
            pass_us: [S, P] the times of the passes of the iteration before the one that has ended;
                None if they are not known.
            max_tokens: the most tokens of any rank in the one that has ended.
            max_experts_per_token: the most experts of a token in it.
        """
        if pass_us is not None:
            turn = self._turns.popleft()
            if turn is not None and self.tuning is not None:
                self.tuning.add(turn, pass_us)
        self.number += 1
        if self.tuning is None and self._num_tuning_steps:
            from monta_megatron.planner.online.tuning import Tuning

            candidates = self.candidates(max_tokens, max_experts_per_token)
            self._tuned_for = self._table.key(max_tokens, max_experts_per_token)
            self.tuning = Tuning(candidates=candidates, num_steps=self._num_tuning_steps)
            self._candidates.clear()
        self._turns.append(None if self.tuning is None else self.tuning.next())

    def settle(self, summaries: Sequence[Sequence[int]]) -> None:
        """End the tuning together with the replicas of the exchange; see `Tuning.settle`."""
        tuning = self.tuning
        assert tuning is not None
        tuning.settle(summaries)
        self._table = ChoiceTable(policy=self._policy, pick=self._pick_tuned)

    def _pick_tuned(self, selection: Selection) -> tuple[ChainPrice, str]:
        """Choice after the tuning, and its reason."""
        tuning = self.tuning
        assert tuning is not None
        winner, shape = tuning.candidates[tuning.winner].key, selection.shape
        is_same = self._tuned_for is not None and shape.tokens_per_rank == self._tuned_for[0]
        prices = {(price.chain.name, price.num_chunks): price for price in selection.rivals}
        over = f"measured over {counted(tuning.num_steps, 'iteration')}"
        if is_same and winner in prices:
            return prices[winner], over
        return tuning.select(selection.rivals, winner), f"by prediction times what was {over}"
