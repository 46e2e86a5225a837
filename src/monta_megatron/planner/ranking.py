"""Layouts that fit a model and a cluster, ranked by the cost of their exchange."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from monta_megatron.chains.program import Phase
from monta_megatron.common.rules import require
from monta_megatron.common.units import size_text
from monta_megatron.core import Routing, Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout, exchanges, shapes_of, uniform_routing
from monta_megatron.planner.models.model import Model
from monta_megatron.planner.models.training_memory import HEADROOM, training_memory
from monta_megatron.planner.plan import slowest_plan
from monta_megatron.planner.routing.drawn import expected_routing, skewed_routing


@dataclass(frozen=True, kw_only=True)
class RankedLayout(ParallelLayout):
    """A layout, with the plan for its exchange.

    Attributes:
        num_nodes: that an exchange lies on.
        tokens: that a rank brings to an exchange.
        chain, num_chunks: of the plan.
        predicted_us: time of the exchanges of one layer and micro-batch.
        us_per_1k_tokens: the same per 1,000 tokens of a rank; layouts differ in tokens per rank.
        peak_bytes: the most that the executor holds at once on one rank.
        needed_bytes: of a training on one rank; None where the parameters cannot be counted.
    """

    num_nodes: int
    tokens: int
    chain: str
    num_chunks: int
    predicted_us: float
    us_per_1k_tokens: float
    peak_bytes: float
    needed_bytes: float | None

    @property
    def name(self) -> str:
        """For messages: "PP 8, TP 1, EP 8"."""
        etp = f", ETP {self.etp}" if self.etp > 1 else ""
        return f"PP {self.pp}, TP {self.tp}, EP {self.ep}{etp}"


def rank_layouts(
    model: Model,
    cluster: Cluster,
    *,
    world_size: int,
    cp: int = 1,
    pp: int | None = None,
    tokens: int | None = None,
    routing: str = "uniform",
    phase: Phase = "forward_backward",
) -> list[RankedLayout]:
    """All (TP, EP, ETP) that fit, the cheapest exchange per token first.

    TP and ETP stay inside a node. If the cluster says how much memory a rank has, layouts that do
    not fit into it are left out; see `training_memory`.

    Args:
        model: the trained model.
        cluster: the cluster it is trained on.
        world_size, cp: the same for all layouts.
        pp: likewise; None for the fewest pipeline stages with which a layout fits and, where none
            of these has its exchange in a node, the fewest with which one does.
        tokens: of a rank; None for the model's batch.
        routing: see `routing_of`.
        phase: the phase to choose for.

    Raises:
        ValueError: no layout fits.
    """
    # Step 1: what fits without its exchange, the fewest stages first.
    memories = {
        layout: training_memory(model, cluster, layout, tokens or layout.tokens_per_rank(model), 0)
        for stages in ([pp] if pp else divisors(world_size))
        for layout in layouts_of(model, cluster, world_size, cp, stages)
    }
    fitting = [layout for layout, memory in memories.items() if memory.fits]

    # Step 2: the exchanges of those that may be the answer.
    layouts: list[RankedLayout] = []
    for layout in fitting:
        shapes = routed_shapes(model, cluster, layout, tokens, routing)
        num_nodes = max(shape.layout.num_nodes for shape in shapes)
        lacks_in_node = all(each.num_nodes > 1 for each in layouts)
        if layouts and layout.pp > layouts[0].pp and not (num_nodes == 1 and lacks_in_node):
            continue
        plan, shape = slowest_plan(shapes, cluster, phase=phase)
        peak_bytes = plan.chosen.peak_bytes or 0.0
        memory = training_memory(model, cluster, layout, shape.tokens_per_rank, peak_bytes)
        if memory.fits:
            ranked = RankedLayout(
                **vars(layout),
                num_nodes=num_nodes,
                tokens=shape.tokens_per_rank,
                chain=plan.chain,
                num_chunks=plan.num_chunks,
                predicted_us=plan.predicted_us,
                us_per_1k_tokens=plan.predicted_us / shape.tokens_per_rank * 1e3,
                peak_bytes=peak_bytes,
                needed_bytes=memory.needed_bytes,
            )
            layouts.append(ranked)
    if not layouts:
        sizes = [memory.needed_bytes for memory in memories.values()]
        least = min((size for size in sizes if size is not None), default=None)
        needs = "" if least is None else f"; the least needs {size_text(least)} of a rank"
        raise ValueError(
            f"world_size: got {world_size}, no (tp, ep, etp) with cp {cp} and pp {pp or 'any'} "
            f"fits {model.name} on {cluster.name}{needs}, beside {HEADROOM:.0%} of headroom; more "
            "ranks may help"
        )
    return sorted(layouts, key=lambda layout: (layout.us_per_1k_tokens, layout.peak_bytes))


def layouts_of(
    model: Model, cluster: Cluster, world_size: int, cp: int, pp: int
) -> Iterator[ParallelLayout]:
    """Every (TP, EP, ETP) that divides model and ranks; TP and ETP stay inside a node."""
    in_node = divisors(cluster.ranks_per_node)
    for tp, etp, ep in product(in_node, in_node, divisors(model.num_experts)):
        if world_size % (tp * cp * pp) == 0 and world_size % (etp * ep * pp) == 0:
            layout = ParallelLayout(world_size=world_size, tp=tp, ep=ep, etp=etp, cp=cp, pp=pp)
            if layout.incompatibility(model) is None:
                yield layout


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]


def routed_shapes(
    model: Model, cluster: Cluster, layout: ParallelLayout, tokens: int | None, routing: str
) -> list[Shape]:
    """The exchanges of a layout, one for each way in which they lie on the nodes.

    Args:
        model, cluster, layout: of the training.
        tokens: of a rank; None for the model's batch.
        routing: see `routing_of`.

    Raises:
        ValueError: the routing does not fit an exchange.
    """
    places = exchanges(layout, model.num_experts, cluster.ranks_per_node)
    routings = [routing_of(routing, model, place.num_nodes) for place in places]
    return shapes_of(model, layout, cluster.ranks_per_node, tokens, routings)


# A ranking asks for every layout.
@cache
def routing_of(name: str, model: Model, num_nodes: int) -> Routing:
    """The routing of a name, see `planner.routing.drawn`, over so many nodes.

    Raises:
        ValueError: the nodes cannot share the experts evenly.
    """
    if name == "uniform":
        return uniform_routing(model)
    experts, topk = model.num_experts, model.moe_router_topk
    if name == "skewed":
        return skewed_routing(experts, topk)
    rule = f"divide the {experts} experts evenly, for --routing {name}"
    require(experts % num_nodes == 0, "nodes of an exchange", num_nodes, rule)
    return expected_routing(name, experts, topk, num_nodes)
