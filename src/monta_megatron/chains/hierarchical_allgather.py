"""`hierarchical_allgather`: one copy of a token per node, gathered by all ranks of the node.

    Permute (split) | Duplicate (per node) | A2A(rail) | AG(node) | Duplicate (per expert) | Permute

It wins where EP spans nodes, top-k is high and nodes have few ranks, so that most tokens of a node
have experts on most of its ranks. Its transpose carries a partial sum per (token, rank) inside the
node and one per (token, node) between nodes: two hops.
"""

from monta_megatron.chains.chain import Chain, ChainCounts, TokenCounts
from monta_megatron.chains.stages import AllGather, BoundStage, bind_gather
from monta_megatron.chains.token_stages import (
    ORDER,
    RAIL_ALLTOALL,
    SPLIT,
    TO_EXPERTS,
    TO_NODES,
    arrival,
    bind_experts,
    bind_node_copies,
    by_chunk,
)
from monta_megatron.core import Layout

GATHER = AllGather(name="allgather in node", group="node")


def bind_stages(layout: Layout, counts: ChainCounts, num_chunks: int) -> tuple[BoundStage, ...]:
    """Rows per stage, chunk and peer; see `Chain.bind`."""
    assert isinstance(counts, TokenCounts)
    assert counts.for_node is not None
    # [S, C] -> [A, q, C] -> [C, q]: tokens that arrived in this node along each rail.
    tokens_SC = by_chunk(counts.for_node, num_chunks, axis=1)
    tokens_Cq = tokens_SC.reshape(layout.num_nodes, layout.ranks_per_node, num_chunks).sum(axis=0).T
    gather = bind_gather(GATHER, tokens_Cq, layout.position)
    return (
        *bind_node_copies(layout, counts, num_chunks),
        gather,
        *bind_experts(
            layout, counts, gather, arrival(len(layout.nodes), layout.etp, layout.ranks_per_node)
        ),
    )


HIERARCHICAL_ALLGATHER = Chain(
    name="hierarchical_allgather",
    rows="tokens",
    stages=(SPLIT, TO_NODES, RAIL_ALLTOALL, GATHER, TO_EXPERTS, ORDER),
    bind_stages=bind_stages,
    incompatibility=Layout.uneven_nodes,
)
