"""Expected rows of a shape: a chain bound to them, and the programs of its passes."""

from dataclasses import replace

from monta_megatron.chains import BoundChain, Chain
from monta_megatron.chains.chain import blocks_for
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import BoundProgram, Pass, Policy, RowFormat
from monta_megatron.core import Layout, Shape

# Of fp32, in which copies of a row are summed at least.
LEAST_SUM_BYTES = 4


def bind_expected(
    shape: Shape, chain: Chain, num_chunks: int, layout: Layout | None = None
) -> BoundChain:
    """The chain bound to the expected rows of one rank.

    Args:
        shape: of the exchange.
        chain: that runs.
        num_chunks: in how many chunks.
        layout: the exchange as the rank sees it; None for the first rank's.
    """
    layout = replace(shape.layout, rank=0) if layout is None else layout
    counts = shape.routing.counts(chain, layout, shape.tokens_per_rank, blocks_for(num_chunks))
    return chain.bind(layout, counts, num_chunks)


def lower_expected(shape: Shape, of_rank: BoundChain, pass_: Pass, policy: Policy) -> BoundProgram:
    """The program of one pass over a bound chain."""
    sum_bytes = max(LEAST_SUM_BYTES, shape.value_bytes)
    if of_rank.chain.rows == "permuted tokens":
        # Megatron reduces permuted tokens in the dtype of their probabilities.
        sum_bytes = max(sum_bytes, shape.prob_bytes)
    row = RowFormat(
        hidden_size=shape.hidden_size,
        value_bytes=shape.value_bytes,
        prob_bytes=shape.prob_bytes,
        sum_bytes=sum_bytes,
    )
    return lower(of_rank, pass_, row, shape.routing.max_experts_per_token, policy)
