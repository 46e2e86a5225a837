"""Where the tokens of a benchmark go: the rows of each exchange, and what is expected of them.

A routing whose steps differ, or a trace, is several exchanges, and two repeats in a row run the
next of them: one on which the best chain is chosen, one on which it is judged (see `regret`). No
torch.

Notation: T = tokens of a rank, E = experts.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains.layout import Layout
from monta_megatron.common.units import counted
from monta_megatron.planner.routing.drawn import (
    expected_routing,
    imbalance_map,
    make_routing,
    num_steps,
)
from monta_megatron.planner.routing.expected import Routing
from monta_megatron.planner.routing.names import IMBALANCE_WORKLOADS, ROUTINGS
from monta_megatron.planner.routing.recorded import (
    Exchange,
    RecordedRouting,
    RouterTrace,
    TracedRouter,
    read_trace,
    typical_exchange,
)
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.bench.traffic import expert_nodes


def exchange_of(repeat: int) -> int:
    """The number of the exchange that a repeat runs; both are negative in the warm-up."""
    return repeat // 2


def routing_maps(settings: Settings, layout: Layout, rank: int) -> list[NDArray[np.bool_]]:
    """The rows of one rank of the launch, [T, E], in one exchange after the other.

    Args:
        settings: what the benchmark was asked for.
        layout: the exchange, as any of its ranks sees it.
        rank: the rank whose tokens these are.

    Raises:
        ValueError: the routing cannot be on this layout, or a trace does not fit.
    """
    if not _is_recorded(settings):
        nodes = expert_nodes(layout)
        tokens, topk = settings.tokens, settings.topk
        return [make_routing(settings.routing, tokens, topk, nodes, settings.seed, rank)]
    return [exchange[rank % len(exchange)] for exchange in _exchanges(settings)]


def routing_of(settings: Settings, layout: Layout) -> Routing:
    """What the planner expects; of several exchanges, a typical one of those that are run.

    Args:
        settings: what the benchmark was asked for.
        layout: the exchange. Where the launch has several, the rows are those of the first.
    """
    if not _is_recorded(settings):
        num_experts, topk = settings.num_experts, settings.topk
        return expected_routing(
            settings.routing, num_experts, topk, layout.num_nodes, settings.seed
        )
    num_ranks = len(layout.nodes)
    exchanges = [exchange[:num_ranks] for exchange in _exchanges(settings)]
    return RecordedRouting(
        name=routing_name(settings),
        routing_maps=typical_exchange(exchanges, num_ranks, layout.ep),
    )


def routing_name(settings: Settings) -> str:
    """The routing, for messages: of a trace also how much of it is run, and what it lacks."""
    if settings.routing in ROUTINGS:
        return IMBALANCE_WORKLOADS.get(settings.routing, settings.routing)
    name = _trace(settings).name(settings.world_size, settings.tokens)
    return f"{name}, {counted(len(_exchanges(settings)), 'exchange')}"


def check_routing(settings: Settings) -> None:
    """Check what can be checked before the layout is known.

    Raises:
        ValueError: a trace does not fit the benchmark, or the experts are too few.
    """
    if _is_recorded(settings):
        _exchanges(settings)


def _is_recorded(settings: Settings) -> bool:
    """Whether the rows are there before they are run, and need not be drawn rank by rank."""
    return settings.routing in IMBALANCE_WORKLOADS or settings.routing not in ROUTINGS


# Asked for by every rank that this one makes data for, and by every prediction.
@lru_cache(maxsize=2)
def _exchanges(settings: Settings) -> list[Exchange]:
    """The exchanges, as many as the repeats run at most."""
    name, num_runs = settings.routing, exchange_of(max(settings.repeats, 1) - 1) + 1
    if name not in ROUTINGS:
        return _trace(settings).exchanges(settings.world_size, settings.tokens)[:num_runs]
    num_experts, topk = settings.num_experts, settings.topk
    return [
        (imbalance_map(name, settings.tokens, num_experts, topk, settings.seed, step),)
        for step in range(min(num_steps(name, num_experts, topk), num_runs))
    ]


def _trace(settings: Settings) -> RouterTrace:
    router = TracedRouter(
        num_experts=settings.num_experts,
        topk=settings.topk,
        topk_name="--top-k",
        owner="this benchmark",
    )
    return read_trace(settings.routing, router, settings.tokens)
