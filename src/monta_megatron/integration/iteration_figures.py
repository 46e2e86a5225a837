"""Figures of an iteration on which the next decisions rest, shared by all ranks of an exchange.

    iteration i        every rank sums up what it receives, and times the passes while tuning
    first exchange of  the ranks start to gather these figures, and nothing waits for them
    iteration i + 1
    end of i + 1       they are there, and decide what runs in iteration i + 2

Notation: S = ranks of the exchange, EP and ETP = sizes of its groups, P = passes of an iteration.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from monta_megatron.chains.layout import Layout
from monta_megatron.chains.program import NOT_TIMED_US
from monta_megatron.exchange.counts import ExchangeCounts, Gathering
from monta_megatron.exchange.pass_times import PassTimes
from monta_megatron.integration.ranks import check_same_config
from monta_megatron.planner.online.decision import Outcome
from monta_megatron.planner.routing.observed import Traffic

# The integers of `Received.figures`.
NUM_FIGURES = 4


@dataclass(kw_only=True)
class Received:
    """Sums over the micro-batches and layers of an iteration; all ranks have the same tokens.

    Attributes:
        tokens: of all ranks.
        pairs: token-expert pairs that came to this rank.
        for_rank: tokens with an expert here, as far as they are counted.
        for_node: tokens with an expert on this node, likewise.
        numbers_of_tokens: of each rank in each micro-batch.
        pairs_of_each: `pairs` of each micro-batch and layer.
    """

    tokens: int = 0
    pairs: int = 0
    for_rank: int = 0
    for_node: int = 0
    numbers_of_tokens: set[int] = field(default_factory=set)
    pairs_of_each: list[int] = field(default_factory=list)

    def add(self, counts: ExchangeCounts) -> None:
        """Add a micro-batch of a layer."""
        self.tokens += int(counts.num_tokens.sum())
        self.pairs_of_each.append(int(counts.permuted_tokens.received.sum()))
        self.pairs += self.pairs_of_each[-1]
        self.numbers_of_tokens.update(counts.num_tokens.tolist())
        if counts.tokens is not None:
            for_rank, for_node = counts.tokens.for_rank, counts.tokens.for_node
            self.for_rank += 0 if for_rank is None else int(for_rank.sum())
            self.for_node += 0 if for_node is None else int(for_node.sum())

    @property
    def figures(self) -> list[int]:
        """Figures that ranks share."""
        return [self.tokens, self.pairs, self.for_rank, self.for_node]


def traffic_of(figures: NDArray[np.int64], layout: Layout) -> Traffic | None:
    """The traffic of an iteration; None if there was none.

    Args:
        figures: [S, 4] the `Received.figures` of all ranks.
        layout: any rank's place.
    """
    # [S], and [EP] since all ranks of an expert tensor parallel group receive the same
    tokens, pairs, for_rank, for_node = figures.T
    if not tokens[0] or not pairs.any():
        return None
    by_rank = slice(None, None, layout.etp)
    nothing = np.empty(0)
    return Traffic(
        pairs=pairs[by_rank] / tokens[0],
        rank_hits=for_rank[by_rank] / tokens[0] if for_rank.any() else nothing,
        # In order on even nodes, or no chain copies tokens for nodes.
        node_hits=for_node[:: layout.ranks_per_node] / tokens[0] if for_node.any() else nothing,
    )


class IterationFigures:
    """Sums up an iteration on this rank while the figures of the one before it are gathered.

    Args:
        group: the ranks of the exchange.
        layout: this rank's place.
        pass_times: times the passes; None where no times are wanted.

    Attributes:
        received: in the iteration under way.
    """

    def __init__(
        self, group: dist.ProcessGroup, layout: Layout, pass_times: PassTimes | None
    ) -> None:
        self._group, self._layout, self._pass_times = group, layout, pass_times
        self._gathering = Gathering(group, "between iterations: exchange of traffic")
        self.received = Received()
        # Of the iteration that has ended, until the next one's first exchange.
        self._finished: list[int] | None = None
        self._pairs: list[int] = []

    def start_gathering(self, device: torch.device, side_stream: torch.cuda.Stream) -> bool:
        """Start to gather the figures of the iteration that has ended; False if that was done."""
        if self._finished is None:
            return False
        # The device has done these passes: the host has waited for counts after them.
        pass_us, exposed_us = [], NOT_TIMED_US
        if self._pass_times is not None:
            pass_us = self._pass_times.collect().tolist()
            exposed_us = self._pass_times.exposed_us
        figures = [*self._finished, exposed_us, *pass_us, *self._pairs]
        self._gathering.start(figures, device, side_stream)
        self._finished = None
        return True

    def end_iteration(self, number: int, is_watched: bool) -> Outcome | None:
        """End the iteration under way.

        Args:
            number: of the iteration that ends.
            is_watched: whether its pairs by micro-batch are shared.

        Returns:
            The gathered outcome of the iteration before it; None if there was none.

        Raises:
            ExchangeError: a rank has died or stopped.
            ValueError: the ranks gathered different iterations.
        """
        outcome = self._outcome() if self._gathering.is_under_way else None
        self._finished = [number, *self.received.figures]
        self._pairs = self.received.pairs_of_each if is_watched else []
        self.received = Received()
        if self._pass_times is not None:
            self._pass_times.end_iteration()
        return outcome

    def drop(self) -> None:
        """Begin anew: what was summed up, or is gathered, counts no longer."""
        if self._gathering.is_under_way:
            self._gathering.finish()
        self.received, self._finished = Received(), None
        if self._pass_times is not None:
            self._pass_times.end_iteration()

    def _outcome(self) -> Outcome:
        # [S, 1], [S, NUM_FIGURES], [S, 1], [S, P]
        numbers, figures, exposed_us, pass_us = np.split(
            self._gathering.finish(), [1, 1 + NUM_FIGURES, 2 + NUM_FIGURES], axis=1
        )
        ranks = dist.get_process_group_ranks(self._group)
        check_same_config([{"iteration": number} for number in numbers[:, 0].tolist()], ranks)
        return Outcome(traffic_of(figures, self._layout), pass_us, exposed_us[:, 0])
