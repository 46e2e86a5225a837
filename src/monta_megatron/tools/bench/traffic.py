"""Routing of a benchmark's tokens, and the bytes of its exchanges, counted from it. No torch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import Phase
from monta_megatron.common.flags import DTYPE_BYTES
from monta_megatron.common.nodes import number_nodes
from monta_megatron.common.units import counted
from monta_megatron.core import Layout, Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import plan
from monta_megatron.planner.routing import UniformRouting
from monta_megatron.tools.bench.settings import Settings

PROBS_BYTES = 4
MAP_BYTES = 1


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that leave a rank for one on another node (inter), or on the same node (intra)."""

    inter_bytes: int
    intra_bytes: int


def by_resource(layout: Layout, hops: Iterable[tuple[int, int, int]]) -> Traffic:
    """Add up hops of (from rank, to rank, bytes); a rank's hop to itself does not count."""
    total: Counter[str] = Counter()
    for source, target, num_bytes in hops:
        if source != target:
            same_node = layout.nodes[source] == layout.nodes[target]
            total["intra" if same_node else "inter"] += num_bytes
    return Traffic(inter_bytes=total["inter"], intra_bytes=total["intra"])


def stock_alltoall(
    layout: Layout, routing_map: NDArray[np.bool_], hidden: int, dtype_bytes: int, backward: bool
) -> Traffic:
    """Bytes of Megatron's alltoall dispatcher for this rank's tokens.

    One row per token-expert pair goes with its probability to the expert's rank (A2A) and on to
    that rank's expert tensor parallel peers (AG), and comes back without it; the reduction over the
    peers (RS) runs in the dtype of the probabilities. The backward pass moves the same bytes.

    Args:
        layout: the exchange, as this rank sees it.
        routing_map: [T, E].
        hidden: hidden size.
        dtype_bytes: bytes of one element of a row.
        backward: count the backward pass too.
    """
    etp_rank = layout.rank % layout.etp
    a2a_bytes = 2 * hidden * dtype_bytes + PROBS_BYTES
    etp_bytes = hidden * dtype_bytes + PROBS_BYTES + hidden * PROBS_BYTES
    num_permuted = routing_map.sum(axis=0).reshape(layout.ep, -1).sum(axis=1).tolist()  # [EP]
    passes = 2 if backward else 1
    hops = []
    for ep_rank, num_tokens in enumerate(num_permuted):
        arrival = ep_rank * layout.etp + etp_rank
        hops.append((layout.rank, arrival, passes * num_tokens * a2a_bytes))
        for peer in range(ep_rank * layout.etp, (ep_rank + 1) * layout.etp):
            hops.append((arrival, peer, passes * num_tokens * etp_bytes))
    return by_resource(layout, hops)


def stock_allgather(
    layout: Layout, routing_map: NDArray[np.bool_], hidden: int, dtype_bytes: int, backward: bool
) -> Traffic:
    """Bytes of Megatron's allgather dispatcher for this rank's tokens.

    Every token goes to every other rank with all its probabilities and its routing map (AG), and
    comes back in the dtype of the probabilities (RS); the backward pass does not need the map.

    Args:
        as for `stock_alltoall`.
    """
    num_tokens, num_experts = routing_map.shape
    token_bytes = hidden * (dtype_bytes + PROBS_BYTES) + num_experts * PROBS_BYTES
    passes = 2 if backward else 1
    num_bytes = num_tokens * (passes * token_bytes + num_experts * MAP_BYTES)
    peers = range(len(layout.nodes))
    return by_resource(layout, ((layout.rank, peer, num_bytes) for peer in peers))


def expert_nodes(layout: Layout) -> NDArray[np.int64]:
    """[E] node of the first rank of each expert."""
    first_ranks = np.arange(layout.ep) * layout.etp
    return np.array(layout.nodes)[first_ranks].repeat(layout.num_local_experts)


def rows_that_cross(
    layout: Layout, routing_map: NDArray[np.bool_], num_nodes: int
) -> NDArray[np.int64]:
    """[num_nodes] tokens of this rank that each other node needs: once per (token, node).

    A node needs a token if one of its ranks holds an expert, or a part of one, that the token
    goes to.
    """
    crossing = np.zeros(num_nodes, dtype=np.int64)
    ranks_by_expert = np.array(layout.nodes).reshape(layout.ep, layout.etp)
    # [T, EP] tokens with an expert of that EP rank
    wanted = routing_map.reshape(len(routing_map), layout.ep, -1).any(axis=2)
    for node in set(layout.nodes) - {layout.nodes[layout.rank]}:
        holders = (ranks_by_expert == node).any(axis=1)
        crossing[node] = wanted[:, holders].any(axis=1).sum()
    return crossing


def limit_ms(crossing: NDArray[np.int64], row_bytes: int, node_gbit_per_s: float) -> float:
    """The least time in which the rows that must cross can cross.

    The busiest direction of the busiest node's network decides. Combine and the two backward passes
    each send the same rows once more, in alternating directions, so that node stays the busiest.

    Hand-worked: 2 nodes, 1,000 rows each way at 0.5 Gbit/s, 4,096 bytes of each there and as many
    back: 131 ms forward, 262 ms with backward.

    Args:
        crossing: [nodes, nodes] rows from each node to each other.
        row_bytes: bytes with which a row crosses in all passes together.
        node_gbit_per_s: rate of one node's network in one direction, 1e9 bit/s.
    """
    busiest_rows = int(max(crossing.sum(axis=1).max(), crossing.sum(axis=0).max()))
    return busiest_rows * row_bytes * 8 / (node_gbit_per_s * 1e6)


def routing_map(settings: Settings, layout: Layout, rank: int) -> NDArray[np.bool_]:
    """[T, E] experts of the tokens of one rank of the launch, the same wherever they are drawn.

        uniform         any experts
        skewed          the i-th most wanted expert is drawn with weight 1/i, in the seed's order
        node-limited    experts on half of the nodes (rounded down), drawn for every token

    Args:
        settings: of the benchmark.
        layout: the exchange, as any of its ranks sees it.
        rank: the rank whose tokens these are.

    Raises:
        ValueError: "node-limited" where half of the nodes hold too few experts.
    """
    generator = np.random.default_rng([settings.seed, rank])
    # The highest of log-weight + Gumbel noise are a weighted draw without replacement.
    scores = generator.gumbel(size=(settings.tokens, settings.num_experts))
    if settings.routing == "skewed":
        order = np.random.default_rng(settings.seed).permutation(settings.num_experts)
        scores -= np.log1p(order)
    if settings.routing == "node-limited":
        of_experts, limit = expert_nodes(layout), node_limit(settings, layout)
        nodes = np.unique(of_experts)
        drawn = generator.random((settings.tokens, len(nodes))).argsort(axis=1)[:, :limit]
        # [T, limit, 1] == [E] -> [T, E]
        scores[~(nodes[drawn][:, :, None] == of_experts).any(axis=1)] = -np.inf
    highest = np.argpartition(scores, -settings.topk, axis=1)[:, -settings.topk :]
    chosen = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(chosen, highest, True, axis=1)
    return chosen


def node_limit(settings: Settings, layout: Layout) -> int:
    """Nodes of a token in "node-limited"."""
    nodes, num_experts = np.unique(expert_nodes(layout), return_counts=True)
    limit = len(nodes) // 2
    if settings.topk > limit * num_experts.min():
        raise ValueError(
            f"--routing: got node-limited, must leave the {settings.topk} experts of a token to "
            f"choose from; half of {counted(len(nodes), 'node')}, rounded down, hold "
            f"{limit * num_experts.min()}"
        )
    return limit


def routing_of(settings: Settings, layout: Layout) -> UniformRouting:
    """Routing that a training's planner expects: its router's, however skewed the data are."""
    router = UniformRouting(num_experts=settings.num_experts, topk=settings.topk)
    if settings.routing != "node-limited":
        return router
    return replace(router, num_groups=layout.num_nodes, group_topk=node_limit(settings, layout))


def predict(
    settings: Settings,
    layout: Layout,
    cluster: Cluster | None,
    phase: Phase,
    candidates: Iterable[tuple[str, int]],
) -> tuple[dict[tuple[str, int], float], tuple[str, int] | None]:
    """Plan with the expected counts of a routing; without a cluster file the result is empty.

    Args:
        settings: of the benchmark.
        layout: the exchange, as this rank sees it.
        cluster: the costs, or None.
        phase: the phase to predict and to optimise.
        candidates: chains and numbers of chunks to choose from.

    Returns:
        Predicted time in ms by chain and number of chunks; and the chain and number of chunks that
        the planner picks, None without a cluster.
    """
    keys = set(candidates)
    if cluster is None or not keys:
        return {}, None
    planned = plan(
        shape_of(settings, layout),
        cluster,
        phase=phase,
        chains=[name for name in CHAINS if name in {chain for chain, _ in keys}],
        num_chunks=sorted({num_chunks for _, num_chunks in keys}),
    )
    predicted_ms = {
        (candidate.chain, candidate.num_chunks): candidate.predicted_us / 1e3
        for candidate in planned.candidates
        if candidate.num_chunks is not None and candidate.predicted_us is not None
    }
    return predicted_ms, (planned.chain, planned.num_chunks)


def shape_of(settings: Settings, layout: Layout) -> Shape:
    """The exchange as the planner sees it."""
    # The planner numbers the nodes of an exchange from 0.
    nodes = number_nodes([str(node) for node in layout.nodes])
    layout = replace(layout, nodes=nodes)
    return Shape(
        layout=layout,
        hidden_size=settings.hidden,
        value_bytes=DTYPE_BYTES[settings.dtype],
        prob_bytes=PROBS_BYTES,
        routing=routing_of(settings, layout),
        tokens_per_rank=settings.tokens,
    )
