"""The nouns that all rooms share: Layout, Shape and Choice. No torch, and nothing of ours.

Letters of shapes in `chains`, `exchange` and `integration`, in comments and as suffixes of names:

    T  tokens of a rank         E  experts                  H  hidden size
    K  experts of a token       W  the most of any token    L  local experts of an EP rank
    N  rows                     M  copies of rows, terms of sums, or rows on the experts' side
    R  other rows: a part of them, or runs
    C  chunks                   B  token blocks
    S  ranks of the exchange    D  EP ranks                 G  ETP ranks; S = D * G
    A  nodes                    Q  ranks of a node          q  rails, one for each of these
    P  parts of the experts, or ranks of a collective's group
    X  columns of a count message                           J  all counts that a rank needs
    1  an axis of length one; behind a letter, one entry more: N1 = N + 1
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias, get_args

GroupName: TypeAlias = Literal["ep", "etp", "tp_ep", "rail", "node"]
# The groups that do not depend on the nodes; only even nodes have rails.
FLAT_GROUPS: tuple[GroupName, ...] = ("ep", "etp", "tp_ep")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One rank's place in the exchange: all that a chain needs besides the counts.

    Attributes:
        ep: expert parallel size.
        etp: expert tensor parallel size.
        num_local_experts: L.
        rank: this rank's position among the S = ep * etp ranks of the exchange, ETP fastest.
        nodes: [S] node of every rank of the exchange.
    """

    ep: int
    etp: int
    num_local_experts: int
    rank: int
    nodes: tuple[int, ...]

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes that the ranks of the exchange lie on."""
        return len(set(self.nodes))

    @cached_property
    def ranks_per_node(self) -> int:
        """Ranks of the exchange on each node, if they are spread evenly."""
        return len(self.nodes) // self.num_nodes

    @property
    def node(self) -> int:
        """Position of this rank's node among the nodes of the exchange."""
        return self.rank // self.ranks_per_node

    @property
    def position(self) -> int:
        """Position of this rank on its node."""
        return self.rank % self.ranks_per_node

    @property
    def num_experts(self) -> int:
        """Experts of the exchange."""
        return self.ep * self.num_local_experts

    @property
    def first_expert(self) -> int:
        """The first expert of this rank."""
        return self.rank // self.etp * self.num_local_experts

    def members(self, group: GroupName, rank: int) -> range:
        """The ranks of the exchange in the group named `group` that contains `rank`."""
        size, etp, per_node = len(self.nodes), self.etp, self.ranks_per_node
        first_of_etp, first_of_node = rank - rank % etp, rank - rank % per_node
        by_name: dict[GroupName, range] = {
            "ep": range(rank % etp, size, etp),
            "etp": range(first_of_etp, first_of_etp + etp),
            "tp_ep": range(size),
            "rail": range(rank % per_node, size, per_node),
            "node": range(first_of_node, first_of_node + per_node),
        }
        return by_name[group]

    @property
    def name(self) -> str:
        """For messages: "EP 8 x ETP 1 over 2 nodes"."""
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        return f"EP {self.ep} x ETP {self.etp} over {nodes}"

    @cached_property
    def crossing_groups(self) -> frozenset[GroupName]:
        """Names of the groups of which at least one has ranks on several nodes."""
        names = get_args(GroupName) if self.uneven_nodes() is None else FLAT_GROUPS
        return frozenset(
            name
            for name in names
            if any(
                len({self.nodes[member] for member in members}) > 1
                for members in {self.members(name, rank) for rank in range(len(self.nodes))}
            )
        )

    def uneven_nodes(self) -> str | None:
        """Why the ranks are not in order on even nodes of whole ETP groups; None if they are."""
        in_order = tuple(sorted(self.nodes)) == self.nodes
        sizes = {self.nodes.count(node) for node in set(self.nodes)}
        if not in_order or len(sizes) > 1:
            return f"the ranks of the exchange lie on nodes {list(self.nodes)}, not evenly in order"
        if self.ranks_per_node % self.etp != 0:
            return (
                f"an expert tensor parallel group of {self.etp} ranks spans nodes of "
                f"{self.ranks_per_node} ranks"
            )
        return None


class Routing(Hashable, Protocol):
    """Where tokens go; see `planner.routing`."""

    @property
    def name(self) -> str:
        """For messages and plans."""

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""

    @property
    def max_experts_per_token(self) -> int:
        """The most experts of any token."""

    def is_even(self, num_parts: int) -> bool:
        """Whether all experts, and all of `num_parts` equal parts of them, get as many tokens."""

    def counts(self, chain: Any, layout: Layout, tokens_per_rank: int, num_blocks: int) -> Any:
        """Counts for `chain.bind`, as the layout's rank sees them."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one MoE layer sends per micro-batch: layout, row size, routing.

    Attributes:
        layout: of the exchange, as any of its ranks sees it.
        hidden_size: hidden size of a row.
        value_bytes: bytes of one hidden value.
        prob_bytes: bytes of one routing probability.
        routing: where tokens go.
        tokens_per_rank: tokens that each rank brings.
    """

    layout: Layout
    hidden_size: int
    value_bytes: int
    prob_bytes: int
    routing: Routing
    tokens_per_rank: int


@dataclass(frozen=True, kw_only=True, order=True)
class Choice:
    """A chain, its number of chunks, and whether the experts run inside its pipeline."""

    chain: str
    num_chunks: int
    splits_experts: bool = False

    @property
    def name(self) -> str:
        """For messages: "hierarchical_alltoall in 4 chunks"."""
        chunks = "1 chunk" if self.num_chunks == 1 else f"{self.num_chunks} chunks"
        experts = " with their experts" if self.splits_experts else ""
        return f"{self.chain} in {chunks}{experts}"

    @property
    def flags(self) -> str:
        """The arguments of a training that pin it."""
        flags = f"--moe-monta-chain {self.chain} --moe-monta-num-chunks {self.num_chunks}"
        return f"{flags} --moe-monta-overlap-experts" if self.splits_experts else flags
