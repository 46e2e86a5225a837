"""What a rank has received in a training iteration, and the traffic that all ranks' figures make.

Notation: S = ranks of the exchange, EP and ETP = sizes of its groups.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains.layout import Layout
from monta_megatron.exchange.counts import ExchangeCounts
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
        """What the ranks tell each other."""
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
