"""What a flex backend's exchange takes, by published figures: DeepEP and Hybrid-EP.

Both send a token once to every node and forward it over the node link once to every rank. A pass
takes the longer of the two times, some of the shorter one, and all of it at a share of the links'
rates that their own benchmarks show. Nothing of this was measured here.
"""

from dataclasses import dataclass
from typing import Literal

from monta_megatron.planner.assumptions import Assumptions
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.routing import UniformRouting

Backend = Literal["deepep", "hybridep"]
BACKENDS: tuple[Backend, ...] = ("deepep", "hybridep")


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
        """What the backends divide by the time: rows to nodes, or inside one node to ranks."""
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
