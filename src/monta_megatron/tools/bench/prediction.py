"""Predicted time of every candidate, the planner's pick, and the regret of picks. No torch.

Regret is the time of a pick over that of the best chain, measured side by side.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import CHAINS
from monta_megatron.chains.layout import Layout, number_nodes
from monta_megatron.chains.program import Phase
from monta_megatron.common.flags import DTYPE_BYTES
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import plan
from monta_megatron.planner.routing.expected import Routing
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.bench.statistics import ratio_interval, ratio_of_medians
from monta_megatron.tools.bench.traffic import PROBS_BYTES, routing_of

# A chain and its number of chunks.
Key: TypeAlias = tuple[str, int]

# With fewer repeats, the halves would say nothing: the medians of all of them decide.
LEAST_REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class Regret:
    """A pick against the best chain.

    Attributes:
        pick: the picked candidate.
        best: the best of all that ran.
        pick_ms, best_ms: their medians over the repeats on which they are judged.
        ratio: pick_ms over best_ms.
        low, high: 95% interval of the ratio; None where the repeats are few or were not kept.
    """

    pick: Key
    best: Key
    pick_ms: float
    best_ms: float
    ratio: float
    low: float | None = None
    high: float | None = None


def regret_by_repeats(pick: Key, times_ms: Mapping[Key, NDArray[np.float64]]) -> Regret:
    """The best is chosen on repeats 1, 3, 5, ... and judged on 2, 4, 6, ...

    Args:
        pick: among those that ran.
        times_ms: [repeats] of each, interleaved; at least two repeats.
    """
    best = min(times_ms, key=lambda key: np.median(times_ms[key][0::2]))
    pick_ms, best_ms = times_ms[pick][1::2], times_ms[best][1::2]
    low, high = ratio_interval(pick_ms, best_ms)
    return Regret(
        pick=pick,
        best=best,
        pick_ms=float(np.median(pick_ms)),
        best_ms=float(np.median(best_ms)),
        ratio=ratio_of_medians(pick_ms, best_ms),
        low=low,
        high=high,
    )


def regret_by_medians(pick: Key, medians_ms: Mapping[Key, float]) -> Regret:
    """The best is chosen and judged on the same medians: at least 1.

    Args:
        pick: among those that ran.
        medians_ms: of each.
    """
    best = min(medians_ms, key=medians_ms.__getitem__)
    return Regret(
        pick=pick,
        best=best,
        pick_ms=medians_ms[pick],
        best_ms=medians_ms[best],
        ratio=medians_ms[pick] / medians_ms[best],
    )


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
