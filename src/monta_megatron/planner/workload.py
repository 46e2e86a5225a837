"""Workload of an exchange: its layout, its rows, and where they go."""

from dataclasses import dataclass, replace

from monta_megatron.chains import BoundChain, Chain
from monta_megatron.chains.chain import blocks_for
from monta_megatron.chains.layout import Layout
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import DISPATCH, BoundProgram, Pass, Policy, RowFormat
from monta_megatron.chains.wire_format import row_bytes
from monta_megatron.planner.routing.expected import Routing

# Of fp32, in which copies of a row are summed at least.
LEAST_SUM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Workload of an exchange.

    Attributes:
        layout: layout of the exchange, as any of its ranks sees it.
        hidden_size: hidden size of a row.
        value_bytes: bytes of one hidden value.
        prob_bytes: bytes of one routing probability.
        routing: where tokens go.
        tokens_per_rank: tokens that each rank brings.
        max_experts_per_token: the most experts of a token, where they are more than the routing's.
        quantized: tokens travel to their experts in eight bits.
    """

    layout: Layout
    hidden_size: int
    value_bytes: int
    prob_bytes: int
    routing: Routing
    tokens_per_rank: int
    max_experts_per_token: int = 0
    quantized: bool = False

    def bind(self, chain: Chain, num_chunks: int, layout: Layout | None = None) -> BoundChain:
        """The chain bound to the expected rows of one rank.

        Args:
            chain: that runs.
            num_chunks: in how many chunks.
            layout: the exchange as the rank sees it; None for the first rank's.
        """
        layout = replace(self.layout, rank=0) if layout is None else layout
        counts = self.routing.counts(chain, layout, self.tokens_per_rank, blocks_for(num_chunks))
        return chain.bind(layout, counts, num_chunks)

    def lower(self, bound: BoundChain, pass_: Pass, policy: Policy) -> BoundProgram:
        """The program of one pass over the chain."""
        max_experts_per_token = self.routing.max_experts_per_token
        sum_bytes = max(LEAST_SUM_BYTES, self.value_bytes)
        if bound.chain.rows == "tokens":
            max_experts_per_token = max(max_experts_per_token, self.max_experts_per_token)
        else:
            # Megatron reduces permuted tokens in the dtype of their probabilities.
            sum_bytes = max(sum_bytes, self.prob_bytes)
        row = RowFormat(
            hidden_size=self.hidden_size,
            value_bytes=self.value_bytes,
            prob_bytes=self.prob_bytes,
            sum_bytes=sum_bytes,
            quantized_bytes=row_bytes(self.hidden_size)
            if self.quantized and pass_ == DISPATCH
            else 0,
        )
        return lower(bound, pass_, row, max_experts_per_token, policy)
