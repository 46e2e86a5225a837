"""Routing of a benchmark's tokens, and the bytes of its exchanges, counted from it. No torch.

Notation: T = tokens of a rank, E = experts.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import Phase
from monta_megatron.common.flags import DTYPE_BYTES
from monta_megatron.common.nodes import number_nodes
from monta_megatron.core import Layout, Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.price import price
from monta_megatron.planner.routing import UniformRouting
from monta_megatron.tools.bench.settings import Settings

PROBS_BYTES = 4
MAP_BYTES = 1


def by_resource(layout: Layout, hops: Iterable[tuple[int, int, int]]) -> tuple[int, int]:
    """Bytes between nodes and inside them, of hops (from rank, to another rank, bytes)."""
    inter_bytes = intra_bytes = 0
    for source, target, num_bytes in hops:
        if layout.nodes[source] != layout.nodes[target]:
            inter_bytes += num_bytes
        elif source != target:
            intra_bytes += num_bytes
    return inter_bytes, intra_bytes


def stock_alltoall(
    layout: Layout, map_TE: NDArray[np.bool_], hidden: int, value_bytes: int, backward: bool
) -> tuple[int, int]:
    """Bytes of Megatron's alltoall dispatcher for this rank's tokens, by `by_resource`.

    One row per token-expert pair goes with its probability to the expert's rank (A2A) and on to
    that rank's expert tensor parallel peers (AG), and comes back without it; the reduction over the
    peers (RS) runs in the dtype of the probabilities. The backward pass moves the same bytes.
    """
    passes = 2 if backward else 1
    a2a_bytes = passes * (2 * hidden * value_bytes + PROBS_BYTES)
    etp_bytes = passes * (hidden * value_bytes + PROBS_BYTES + hidden * PROBS_BYTES)
    num_permuted = map_TE.sum(axis=0).reshape(layout.ep, -1).sum(axis=1).tolist()  # [EP]
    hops = []
    for ep_rank, num_rows in enumerate(num_permuted):
        arrival = ep_rank * layout.etp + layout.rank % layout.etp
        hops.append((layout.rank, arrival, num_rows * a2a_bytes))
        hops += [(arrival, peer, num_rows * etp_bytes) for peer in layout.members("etp", arrival)]
    return by_resource(layout, hops)


def stock_allgather(
    layout: Layout, map_TE: NDArray[np.bool_], hidden: int, value_bytes: int, backward: bool
) -> tuple[int, int]:
    """Bytes of Megatron's allgather dispatcher for this rank's tokens, by `by_resource`.

    Every token goes to every other rank with all its probabilities and its routing map (AG), and
    comes back in the dtype of the probabilities (RS); the backward pass does not need the map.
    """
    num_tokens, num_experts = map_TE.shape
    token_bytes = hidden * (value_bytes + PROBS_BYTES) + num_experts * PROBS_BYTES
    num_bytes = num_tokens * ((2 if backward else 1) * token_bytes + num_experts * MAP_BYTES)
    peers = range(len(layout.nodes))
    return by_resource(layout, ((layout.rank, peer, num_bytes) for peer in peers))


STOCK_TRAFFIC = {"alltoall": stock_alltoall, "allgather": stock_allgather}


def rows_that_cross(layout: Layout, map_TE: NDArray[np.bool_], num_nodes: int) -> NDArray[np.int64]:
    """[nodes, nodes] tokens of this rank that another node needs, from its node to that one.

    A node needs a token, once, if one of its ranks holds an expert, or a part of one, of the token.
    """
    crossing = np.zeros((num_nodes, num_nodes), dtype=np.int64)
    ranks_by_expert = np.array(layout.nodes).reshape(layout.ep, layout.etp)
    # [T, EP] tokens with an expert of that EP rank
    wanted = map_TE.reshape(len(map_TE), layout.ep, -1).any(axis=2)
    here = layout.nodes[layout.rank]
    for node in set(layout.nodes) - {here}:
        holders = (ranks_by_expert == node).any(axis=1)
        crossing[here, node] = wanted[:, holders].any(axis=1).sum()
    return crossing


def limit_ms(crossing: NDArray[np.int64], row_bytes: int, node_gbit_per_s: float) -> float | None:
    """The least time in which the rows that must cross can cross; None if none must.

    The busiest direction of the busiest node's network decides. Combine and the two backward passes
    each send the same rows once more, in alternating directions, so that node stays the busiest.

    Args:
        crossing: [nodes, nodes] rows from each node to each other.
        row_bytes: bytes with which a row crosses in all passes together.
        node_gbit_per_s: rate of one node's network in one direction, 1e9 bit/s.
    """
    busiest_rows = int(max(crossing.sum(axis=1).max(), crossing.sum(axis=0).max()))
    return busiest_rows * row_bytes * 8 / (node_gbit_per_s * 1e6) or None


def routing_map(settings: Settings, rank: int) -> NDArray[np.bool_]:
    """[T, E] experts of the tokens of one rank of the launch, the same wherever they are drawn.

    uniform     any experts
    skewed      the i-th most wanted expert is drawn with weight 1/i, in the seed's order
    """
    generator = np.random.default_rng([settings.seed, rank])
    # The highest of log-weight + Gumbel noise are a weighted draw without replacement.
    scores = generator.gumbel(size=(settings.tokens, settings.experts))
    if settings.routing == "skewed":
        order = np.random.default_rng(settings.seed).permutation(settings.experts)
        scores -= np.log1p(order)
    highest = np.argpartition(scores, -settings.top_k, axis=1)[:, -settings.top_k :]
    chosen = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(chosen, highest, True, axis=1)
    return chosen


def shape_of(settings: Settings, layout: Layout) -> Shape:
    """The exchange as a training's planner sees it: its router's routing, however skewed it is."""
    # The planner numbers the nodes of an exchange from 0.
    layout = replace(layout, nodes=number_nodes([str(node) for node in layout.nodes]))
    return Shape(
        layout=layout,
        hidden_size=settings.hidden,
        value_bytes=DTYPE_BYTES[settings.dtype],
        prob_bytes=PROBS_BYTES,
        routing=UniformRouting(num_experts=settings.experts, topk=settings.top_k),
        tokens_per_rank=settings.tokens,
    )


def predict_ms(shape: Shape, cluster: Cluster, chain: str, num_chunks: int, phase: Phase) -> float:
    """Predicted time of a chain."""
    return price(shape, cluster, CHAINS[chain], num_chunks, phase).total_us / 1e3
