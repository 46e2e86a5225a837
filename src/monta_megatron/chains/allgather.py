"""`allgather`: every rank gets every token, and copies those of its own experts.

    Permute (split) | AG(TP x EP) | Duplicate (per expert) | Permute (into expert order)

It wins where few ranks share the experts and top-k is close to their number, so that most tokens
go to most ranks anyway. Its transpose sums a token's partial sums over all ranks: one hop.
"""

from monta_megatron.chains.chain import Chain, ChainCounts, TokenCounts
from monta_megatron.chains.stages import AllGather, BoundStage, bind_gather
from monta_megatron.chains.token_stages import (
    ORDER,
    SPLIT,
    TO_EXPERTS,
    arrival,
    bind_experts,
    bind_split,
    by_chunk,
)
from monta_megatron.core import Layout

GATHER = AllGather(name="allgather", group="tp_ep")


def bind_stages(layout: Layout, counts: ChainCounts, num_chunks: int) -> tuple[BoundStage, ...]:
    """Rows per stage, chunk and peer; see `Chain.bind`."""
    assert isinstance(counts, TokenCounts)
    tokens_CS = by_chunk(counts.tokens, num_chunks, axis=1).T
    gather = bind_gather(GATHER, tokens_CS, layout.rank)
    return (
        bind_split(layout, counts, num_chunks),
        gather,
        *bind_experts(layout, counts, gather, arrival(len(layout.nodes), layout.etp)),
    )


ALLGATHER = Chain(
    name="allgather",
    rows="tokens",
    stages=(SPLIT, GATHER, TO_EXPERTS, ORDER),
    bind_stages=bind_stages,
)
