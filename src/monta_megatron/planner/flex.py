"""Exchange time of flex backends, by published figures: DeepEP and Hybrid-EP.

NCCL EP, the third, has published none. The first two send a token once to every node and forward it
over the node link once to every rank. A pass takes the longer of the two times, some of the shorter
one, and all of it at a share of the links' rates that their own benchmarks show. Nothing of this
was measured here.
"""

from dataclasses import dataclass
from typing import Literal

from monta_megatron.chains.layout import Layout
from monta_megatron.chains.program import PASSES, Phase
from monta_megatron.planner.assumptions import Assumptions, assumptions_of, gpu_names, named_gpu
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.experts import Work
from monta_megatron.planner.routing.expected import UniformRouting
from monta_megatron.planner.workload import Workload

Backend = Literal["deepep", "hybridep"]
BACKENDS: tuple[Backend, ...] = ("deepep", "hybridep")
# Of DeepEP's normal kernels: ranks of a node, and nodes (DeepEP issues 90 and 104).
DEEPEP_RANKS_ON_NODE, DEEPEP_MOST_NODES = 8, 20


@dataclass(frozen=True, kw_only=True)
class FlexPrediction:
    """Exchange of a layer and micro-batch with a backend of stock's `flex`.

    Attributes:
        backend: as `--moe-flex-dispatcher-backend` names it.
        predicted_us: by published figures; None where it does not run or none was found.
        range_us: by the cluster's ends; None as in `plan.Candidate`.
        why_not: why there is no prediction, with its source; None where there is one.
    """

    backend: Literal[Backend, "ncclep"]
    predicted_us: float | None = None
    range_us: tuple[float, float] | None = None
    why_not: str | None = None


@dataclass(frozen=True, kw_only=True)
class FlexExchange:
    """Whose tokens go where.

    Attributes:
        routing: of the tokens.
        tokens_per_rank: that each rank brings.
        row_bytes: of a hidden row.
        ep: expert parallel size.
        etp: expert tensor parallel size: every rank of an expert gets its tokens.
        ranks_per_node: that the node link joins.
    """

    routing: UniformRouting
    tokens_per_rank: int
    row_bytes: float
    ep: int
    etp: int = 1
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """Ranks of the exchange."""
        return self.ep * self.etp

    @property
    def num_nodes(self) -> int:
        """Nodes of the exchange."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def ranks_on_node(self) -> int:
        """Ranks of it on a node."""
        return min(self.ranks, self.ranks_per_node)

    @property
    def rows_to_nodes(self) -> float:
        """Rows that leave a rank, one for each node of a token, its own node included."""
        # An expert may lie on several nodes.
        parts = min(self.num_nodes, self.ep)
        hits = float(self.routing.hits(parts).sum())
        return self.tokens_per_rank * hits * self.num_nodes / parts

    @property
    def rows_to_ranks(self) -> float:
        """Likewise one for each rank of a token, itself included."""
        return self.tokens_per_rank * float(self.routing.hits(self.ep).sum()) * self.etp

    @property
    def printed_bytes(self) -> float:
        """Bytes that backends divide by the time: rows to nodes, or to ranks inside one node."""
        rows = self.rows_to_nodes if self.num_nodes > 1 else self.rows_to_ranks
        return rows * self.row_bytes


def flex_pass_us(
    exchange: FlexExchange, cluster: Cluster, backend: Backend, assumed: Assumptions
) -> float:
    """One pass: dispatch, combine, or the backward of one.

    Args:
        exchange: whose tokens go where.
        cluster: with the rates of its links.
        backend: of stock's `flex`.
        assumed: its efficiency, and the share of the shorter time that it does not hide.
    """
    efficiency = assumed[f"{backend}_efficiency"]
    nodes, here = exchange.num_nodes, exchange.ranks_on_node
    # The rank with the same position on a node needs no node link.
    on_link = exchange.rows_to_ranks * exchange.row_bytes * (here - 1) / here
    link = cluster.time_us("alltoall", "intra", on_link / efficiency, here).us
    if nodes == 1:
        return link
    crossing = exchange.rows_to_nodes * exchange.row_bytes * (nodes - 1) / nodes
    # Both send along rails.
    network = cluster.time_us("alltoall", "inter", crossing / efficiency, nodes).us
    shorter, longer = sorted((link, network))
    return longer + assumed[f"{backend}_serial"] * shorter


def one_way_us(
    exchange: FlexExchange, cluster: Cluster, backend: Backend, assumed: Assumptions
) -> float:
    """One pass with the copies around it; see `flex_pass_us`."""
    # Rows are copied to their experts on arrival, and summed before they leave.
    received = exchange.rows_to_ranks
    received += exchange.tokens_per_rank * exchange.routing.topk * exchange.etp
    copy = Work(kind="memory", num_bytes=received * exchange.row_bytes)
    copy_us = copy.forward_us(assumed, memory_rate(cluster))
    pass_us = flex_pass_us(exchange, cluster, backend, assumed)
    return pass_us + copy_us + assumed[f"{backend}_pass_us"]


def memory_rate(cluster: Cluster) -> float:
    """GB/s of a GPU's memory, from the time of a large copy."""
    num_bytes = 1e9
    large, small = (
        cluster.time_us("copy", "memory", size).us for size in (num_bytes, num_bytes / 2)
    )
    return num_bytes / 2 / (large - small) / 1e3


def predict_flex(workload: Workload, cluster: Cluster, phase: Phase) -> list[FlexPrediction]:
    """The exchange of a workload with each backend, or why there is no figure.

    Args:
        workload: the exchange.
        cluster: the cluster it runs on.
        phase: the passes that are timed.
    """
    predictions = []
    for backend in BACKENDS:
        reason = why_not(backend, workload.layout, cluster)
        if reason is None and not isinstance(workload.routing, UniformRouting):
            reason = "its figures are for uniform routing"
        if reason is not None:
            predictions.append(FlexPrediction(backend=backend, why_not=reason))
            continue
        likely, *ends = (
            len(PASSES[phase]) * _pass_us(workload, at, backend)
            for at in (cluster, *(cluster.ends or ()))
        )
        range_us = (min(ends), max(ends)) if ends else None
        predictions.append(FlexPrediction(backend=backend, predicted_us=likely, range_us=range_us))
    reason = _no_gpu(cluster) or "no published figure was found to predict it by"
    return [*predictions, FlexPrediction(backend="ncclep", why_not=reason)]


def why_not(backend: Backend, layout: Layout, cluster: Cluster) -> str | None:
    """Why a backend does not run an exchange on a cluster, by its name; None where it does."""
    problem = _no_gpu(cluster)
    if problem is not None:
        return problem
    ranks_on_node = max(map(layout.nodes.count, set(layout.nodes)))
    if "PCIe" in cluster.name:
        return "needs NVLink between the GPUs of a node (DeepEP issue 162)"
    is_ampere = named_gpu(cluster.name) in ("A100", "A800")
    if backend == "hybridep" and is_ampere:
        return "its copies are Hopper's TMA (DeepEP, branch hybrid-ep)"
    if backend == "deepep" and ranks_on_node > DEEPEP_RANKS_ON_NODE:
        return f"joins at most {DEEPEP_RANKS_ON_NODE} ranks by NVLink (DeepEP issues 104 and 579)"
    if layout.num_nodes == 1:
        return None
    if is_ampere:
        return "has no kernels between nodes for Ampere (DeepEP issues 149 and 234)"
    if "EFA" in cluster.name:
        return "needs IBGDA between nodes, which EFA has not (DeepEP issue 759: mlx5 alone)"
    if backend == "deepep" and ranks_on_node != DEEPEP_RANKS_ON_NODE:
        return f"needs {DEEPEP_RANKS_ON_NODE} ranks on each of several nodes (DeepEP issue 104)"
    if backend == "deepep" and layout.num_nodes > DEEPEP_MOST_NODES:
        return f"its kernels are for at most {DEEPEP_MOST_NODES} nodes (DeepEP issue 90)"
    return None


def _no_gpu(cluster: Cluster) -> str | None:
    if cluster.copies_block_host:
        return "needs GPUs"
    if named_gpu(cluster.name) is None:
        return f"the name of the cluster holds none of {', '.join(gpu_names())}"
    return None


def _pass_us(workload: Workload, cluster: Cluster, backend: Backend) -> float:
    layout, gpu = workload.layout, named_gpu(cluster.name)
    assert isinstance(workload.routing, UniformRouting) and gpu is not None, "it was checked"
    exchange = FlexExchange(
        routing=workload.routing,
        tokens_per_rank=workload.tokens_per_rank,
        row_bytes=workload.hidden_size * workload.value_bytes,
        ep=layout.ep,
        etp=layout.etp,
        ranks_per_node=max(map(layout.nodes.count, set(layout.nodes))),
    )
    return one_way_us(exchange, cluster, backend, assumptions_of(gpu, cluster.name))
