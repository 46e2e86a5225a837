"""Predicted time of every candidate, and the planner's pick. No torch."""

from collections.abc import Iterable
from dataclasses import replace

from monta_megatron.chains import CHAINS
from monta_megatron.chains.layout import Layout, number_nodes
from monta_megatron.chains.program import Phase
from monta_megatron.common.flags import DTYPE_BYTES
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import plan
from monta_megatron.planner.routing.expected import Routing
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.bench.traffic import PROBS_BYTES, routing_of


def predict(
    settings: Settings,
    layout: Layout,
    cluster: Cluster | None,
    phase: Phase,
    candidates: Iterable[tuple[str, int]],
    routing: Routing | None = None,
) -> tuple[dict[tuple[str, int], float], tuple[str, int] | None]:
    """Plan with the expected counts of a routing; without a cluster file the result is empty.

    Args:
        settings: of the benchmark.
        layout: the exchange, as this rank sees it.
        cluster: the costs, or None.
        phase: the phase to predict and to optimise.
        candidates: chains and numbers of chunks to choose from.
        routing: where tokens go; None for the routing of the benchmark.

    Returns:
        Predicted time in ms by chain and number of chunks; and the chain and number of chunks that
        the planner picks, None without a cluster.
    """
    keys = set(candidates)
    if cluster is None or not keys:
        return {}, None
    workload = workload_of(settings, layout)
    planned = plan(
        workload if routing is None else replace(workload, routing=routing),
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


def workload_of(settings: Settings, layout: Layout) -> Workload:
    """The exchange as the planner sees it."""
    # The planner numbers the nodes of an exchange from 0.
    nodes = number_nodes([str(node) for node in layout.nodes])
    layout = replace(layout, nodes=nodes)
    return Workload(
        layout=layout,
        hidden_size=settings.hidden,
        value_bytes=DTYPE_BYTES[settings.dtype],
        prob_bytes=PROBS_BYTES,
        routing=routing_of(settings, layout),
        tokens_per_rank=settings.tokens,
    )
