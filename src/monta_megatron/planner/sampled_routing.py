"""Routings without a formula: drawn, or read from a trace.

Notation: T = tokens of a rank, E = experts, S = source ranks, B = token blocks, L = local experts,
EP = expert parallel size.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import Chain, Counts, Layout, TokenCounts
from monta_megatron.planner.routing import ExpectedRouting

# Tokens drawn to find the expected counts of a routing that has no formula.
NUM_SAMPLES = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledRouting(ExpectedRouting):
    """Shares of a sample of tokens: of a trace, or drawn where there is no formula.

    Attributes:
        name: for messages and plans.
        routing_map: [N, E] bool, one row per token of the sample.
    """

    name: str
    routing_map: NDArray[np.bool_]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.routing_map.shape[1]

    @property
    def list_width(self) -> int:
        """The longest list of any token of the sample."""
        return max(int(self.routing_map.sum(axis=1).max(initial=0)), 1)

    @property
    def is_even(self) -> bool:
        """Some experts are wanted more than others."""
        return False

    @property
    def pairs(self) -> NDArray[np.float64]:
        """[E] pairs per token and expert."""
        return self.routing_map.mean(axis=0)

    def hits(self, num_parts: int) -> NDArray[np.float64]:
        """[P] share of the tokens that have an expert in each part."""
        num_samples = self.routing_map.shape[0]
        hits: NDArray[np.float64] = (
            self.routing_map.reshape(num_samples, num_parts, -1).any(axis=2).mean(axis=0)
        )
        return hits


def skewed_routing(num_experts: int, topk: int, seed: int = 0) -> SampledRouting:
    """The i-th most wanted expert is drawn with weight 1/i, the order being random."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(num_experts)
    # The largest of log-weight + Gumbel noise are a draw without replacement by weight.
    scores = generator.gumbel(size=(NUM_SAMPLES, num_experts)) - np.log1p(order)
    chosen = np.argpartition(scores, num_experts - topk, axis=1)[:, num_experts - topk :]
    routing_map = np.zeros((NUM_SAMPLES, num_experts), dtype=np.bool_)
    np.put_along_axis(routing_map, chosen, True, axis=1)
    return SampledRouting(name="skewed", routing_map=routing_map)


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredRouting:
    """One micro-batch of every rank of the exchange: integer counts, as the executor counts them.

    Attributes:
        routing_maps: [S] of [T, E] bool; ranks may have different numbers of tokens.
    """

    routing_maps: tuple[NDArray[np.bool_], ...]

    @property
    def name(self) -> str:
        """See `Routing`."""
        return "measured"

    @property
    def num_experts(self) -> int:
        """E."""
        return self.routing_maps[0].shape[1]

    @property
    def list_width(self) -> int:
        """The longest list of any rank."""
        return max(
            max((int(each.sum(axis=1).max(initial=0)) for each in self.routing_maps), default=0), 1
        )

    @property
    def is_even(self) -> bool:
        """Every rank has counts of its own."""
        return False

    def counts(
        self, chain: Chain, layout: Layout, tokens_per_rank: int, num_blocks: int
    ) -> Counts | TokenCounts:
        """See `Routing`; the tokens are those of the maps."""
        own = slice(layout.first_expert, layout.first_expert + layout.num_local_experts)
        if chain.rows == "pairs":
            # [S, E] -> [EP, ETP, E] -> [ETP, EP, L]
            table = np.stack([each.sum(axis=0) for each in self.routing_maps])
            received = table.reshape(layout.ep, layout.etp, -1).transpose(1, 0, 2)[:, :, own]
            return Counts(sent=table[layout.rank].reshape(layout.ep, -1), received=received)

        blocks = np.stack([self._blocks(each, num_blocks) for each in self.routing_maps])
        lengths = [self._block_lengths(len(each), num_blocks) for each in self.routing_maps]
        fields: dict[str, NDArray[np.int64]] = {}
        for part in chain.parts:
            if part == "node":
                by_node = _hits(blocks, layout.num_nodes)
                fields["sent_to_nodes"] = by_node[layout.rank]
                fields["for_node"] = by_node[:, :, layout.node]
            elif part == "rank":
                by_rank = _hits(blocks, layout.ep)
                if "node" in chain.parts:
                    first = layout.node * layout.ranks_per_node
                    fields["for_node_ranks"] = by_rank[:, :, first : first + layout.ranks_per_node]
                else:
                    fields["sent_to_ranks"] = by_rank[layout.rank]
                    fields["for_rank"] = by_rank[:, :, layout.rank]
        return TokenCounts(
            tokens=np.array(lengths), experts=blocks.sum(axis=2)[:, :, own], **fields
        )

    def _blocks(self, routing_map: NDArray[np.bool_], num_blocks: int) -> NDArray[np.bool_]:
        """[T, E] -> [B, longest T/B, E], filled up with tokens that go nowhere."""
        longest = max(len(each) for each in self.routing_maps)
        padded_length = max(-(-longest // num_blocks), 1)
        blocks = np.zeros((num_blocks, padded_length, routing_map.shape[1]), dtype=np.bool_)
        start = 0
        for block, length in zip(
            blocks, self._block_lengths(len(routing_map), num_blocks), strict=True
        ):
            block[:length] = routing_map[start : start + length]
            start += length
        return blocks

    @staticmethod
    def _block_lengths(num_tokens: int, num_blocks: int) -> list[int]:
        """[B] tokens of each block: full ones, then the rest, as the executor cuts them."""
        size = max(-(-num_tokens // num_blocks), 1)
        return [min(max(num_tokens - block * size, 0), size) for block in range(num_blocks)]


def _hits(blocks: NDArray[np.bool_], num_parts: int) -> NDArray[np.int64]:
    """[S, B, T/B, E] -> [S, B, P]: tokens with an expert in each part."""
    hits: NDArray[np.int64] = (
        blocks.reshape(*blocks.shape[:3], num_parts, -1).any(axis=4).sum(axis=2)
    )
    return hits
