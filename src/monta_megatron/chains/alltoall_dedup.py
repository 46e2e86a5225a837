"""`alltoall_dedup`: one copy of a token per destination rank, however many experts it has there.

    Permute (split) | Duplicate (per rank) | A2A(EP) | Duplicate (per expert) | Permute (to order)

It wins where EP lies on one node and top-k > 1 (Occult, arXiv 2505.13345). Its transpose carries
one partial sum per (token, rank): one hop.
"""

from monta_megatron.chains.chain import Chain, ChainCounts, TokenCounts
from monta_megatron.chains.stages import AllToAll, BoundStage, Parts
from monta_megatron.chains.token_stages import (
    ORDER,
    SPLIT,
    TO_EXPERTS,
    TO_RANKS,
    arrival,
    bind_experts,
    bind_split,
    by_chunk,
)
from monta_megatron.core import Layout

EP_ALLTOALL = AllToAll(name="alltoall", group="ep")


def incompatibility(layout: Layout) -> str | None:
    """Not for ETP > 1: every rank of an expert would need the copy, as in the AllGather chains."""
    if layout.etp > 1:
        return (
            f"expert_tensor_parallel_size is {layout.etp}, this chain is for 1; "
            "alltoall_allgather, allgather and hierarchical_allgather are for more"
        )
    return None


def bind_stages(layout: Layout, counts: ChainCounts, num_chunks: int) -> tuple[BoundStage, ...]:
    """Rows per stage, chunk and peer; see `Chain.bind`."""
    assert isinstance(counts, TokenCounts)
    assert counts.sent_to_ranks is not None and counts.for_rank is not None
    split = bind_split(layout, counts, num_chunks)
    sent_CD = by_chunk(counts.sent_to_ranks, num_chunks, axis=0)
    received_CD = by_chunk(counts.for_rank, num_chunks, axis=1).T
    parts = Parts(first=0, size=layout.num_local_experts, num_parts=layout.ep)
    alltoall = BoundStage(stage=EP_ALLTOALL, send=sent_CD, receive=received_CD)
    return (
        split,
        BoundStage(stage=TO_RANKS, send=split.receive, receive=sent_CD, parts=parts),
        alltoall,
        *bind_experts(layout, counts, alltoall, arrival(layout.ep, layout.etp)),
    )


ALLTOALL_DEDUP = Chain(
    name="alltoall_dedup",
    rows="tokens",
    stages=(SPLIT, TO_RANKS, EP_ALLTOALL, TO_EXPERTS, ORDER),
    bind_stages=bind_stages,
    incompatibility=incompatibility,
)
