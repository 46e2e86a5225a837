"""`hierarchical_alltoall`: one copy of a token per node, then one per rank inside it.

    Permute (split) | Duplicate (per node) | A2A(rail) | Duplicate (per rank) | A2A(node)
                | Duplicate (per expert) | Permute (into expert order)

It wins where EP spans nodes of many ranks (Hybrid-EP's route). Its transpose carries a partial sum
per (token, rank) inside the node and one per (token, node) between nodes: two hops.
"""

from monta_megatron.chains.alltoall_dedup import incompatibility as incompatibility_of_dedup
from monta_megatron.chains.chain import Chain, ChainCounts, TokenCounts
from monta_megatron.chains.stages import AllToAll, BoundStage, Parts
from monta_megatron.chains.token_stages import (
    ORDER,
    RAIL_ALLTOALL,
    SPLIT,
    TO_EXPERTS,
    TO_NODES,
    TO_RANKS,
    arrival,
    bind_experts,
    bind_node_copies,
    by_chunk,
)
from monta_megatron.core import Layout

NODE_ALLTOALL = AllToAll(name="alltoall in node", group="node")


def incompatibility(layout: Layout) -> str | None:
    """Not for ETP > 1, as `alltoall_dedup`, nor for uneven nodes, which have no rails."""
    return incompatibility_of_dedup(layout) or layout.uneven_nodes()


def bind_stages(layout: Layout, counts: ChainCounts, num_chunks: int) -> tuple[BoundStage, ...]:
    """Rows per stage, chunk and peer; see `Chain.bind`."""
    assert isinstance(counts, TokenCounts)
    assert counts.for_node_ranks is not None
    num_ranks = layout.ranks_per_node
    split, to_nodes, along_rail = bind_node_copies(layout, counts, num_chunks)
    # [S, C, Q] -> [A, q, C, Q] -> [q, C, Q]: tokens of each rail for each rank of this node.
    tokens_SCQ = by_chunk(counts.for_node_ranks, num_chunks, axis=1)
    tokens_qCQ = tokens_SCQ.reshape(layout.num_nodes, num_ranks, num_chunks, num_ranks).sum(axis=0)
    sent_CQ = tokens_qCQ[layout.position]
    received_CQ = tokens_qCQ[:, :, layout.position].T
    parts = Parts(
        first=layout.node * num_ranks * layout.num_local_experts,
        size=layout.num_local_experts,
        num_parts=num_ranks,
    )
    arrived_C1 = along_rail.receive.sum(axis=1, keepdims=True)
    in_node = BoundStage(stage=NODE_ALLTOALL, send=sent_CQ, receive=received_CQ)
    return (
        split,
        to_nodes,
        along_rail,
        BoundStage(stage=TO_RANKS, send=arrived_C1, receive=sent_CQ, parts=parts),
        in_node,
        *bind_experts(layout, counts, in_node, arrival(len(layout.nodes), layout.etp, num_ranks)),
    )


HIERARCHICAL_ALLTOALL = Chain(
    name="hierarchical_alltoall",
    rows="tokens",
    stages=(SPLIT, TO_NODES, RAIL_ALLTOALL, TO_RANKS, NODE_ALLTOALL, TO_EXPERTS, ORDER),
    bind_stages=bind_stages,
    incompatibility=incompatibility,
)
