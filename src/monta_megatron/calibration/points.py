"""What is measured on a cluster of a given shape: a short list of points. No torch.

A point is one operation at one size, by all ranks at once, as in a real exchange: every rail at
the same time, every node at the same time. A pair is two points beside each other.

Groups with d ranks on each of N nodes of R ranks, for d = 1, 2, 4, ... and R:

    inter   N * d ranks; at d = 1 the rails, at d = R the whole exchange, between them the EP
            groups beside expert tensor parallelism R / d inside the node
    intra   d consecutive ranks of a node; at d = R the node, below that ETP groups
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from monta_megatron.planner.cluster import Resource
from monta_megatron.planner.curves import Operation, Tier
from monta_megatron.planner.traffic import FIND_PASSES, FIND_VALUE_BYTES

# Per rank. Far apart, and none a power of two, as the sizes of real exchanges mostly are.
LADDER_BYTES = tuple(5 * 1024 * 4**step for step in range(6))
LADDER_IN_MEMORY_BYTES = tuple(20 * 1024 * 4**step for step in range(6))
# A message is made of such rows, so that it can be cut for any number of peers.
MESSAGE_ROW_BYTES = 16

# The rows of operations in memory, and the lists of experts that come with them.
HIDDEN_ROW_BYTES = 4096
NUM_EXPERTS = 64
TOPK = 8
# Copies of a row that a sum adds up.
NUM_COPIES = 2

# Read and written per row, counted as planner.traffic counts them.
BYTES_PER_ROW: dict[Operation, int] = {
    "copy": 2 * HIDDEN_ROW_BYTES,
    "put": 2 * HIDDEN_ROW_BYTES,
    "sum": (NUM_COPIES + 1) * HIDDEN_ROW_BYTES,
    "find": FIND_PASSES * FIND_VALUE_BYTES * TOPK,
    "permute": 2 * HIDDEN_ROW_BYTES * TOPK,
    "unpermute": (TOPK + 1) * HIDDEN_ROW_BYTES,
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Nodes and the ranks on each."""

    num_nodes: int
    ranks_per_node: int

    @property
    def parts(self) -> list[int]:
        """How many ranks of a node a group may have: 1, 2, 4, ... that divide R, and R."""
        parts, part = [], 1
        while part < self.ranks_per_node:
            if self.ranks_per_node % part == 0:
                parts.append(part)
            part *= 2
        return [*parts, self.ranks_per_node]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One operation at one size.

    Attributes:
        operation: what is done.
        tier: through which the bytes go.
        group_size: ranks that take part; 1 for operations in memory.
        ranks_on_node: of them, on each node.
        num_rows: to every peer, or in memory.
        num_bytes: per rank that leave it in this tier, or that it reads and writes.
    """

    operation: Operation
    tier: Tier
    group_size: int
    ranks_on_node: int
    num_rows: int
    num_bytes: int

    @property
    def name(self) -> str:
        """As it is recorded."""
        return f"{self.operation} {self.tier} {self.group_size} {self.num_bytes}"

    @property
    def is_collective(self) -> bool:
        """Whether other ranks take part."""
        return self.tier != "memory"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A collective, and beside it an operation on another resource, several times.

    Attributes:
        first: the collective.
        second: the other operation.
        repeats: of the second one, so that both take about as long.
    """

    first: Point
    second: Point
    repeats: int

    @property
    def name(self) -> str:
        """As it is recorded."""
        return f"{self.first.name} beside {self.repeats} x {self.second.name}"


@dataclass(frozen=True, kw_only=True)
class HostWork:
    """What the host does around the stages of an exchange: no collective, a handful of rows.

    Attributes:
        name: as it is recorded.
    """

    name: str


# Counting, reading and binding, for the exchange of all ranks; once per dispatch.
COUNTS = HostWork(name="host counts")
# The four walks of the executor and autograd, of a rank with itself.
WALKS = HostWork(name="host walks")

Task: TypeAlias = Point | Pair | HostWork

# Of each two resources, what stands for them: the operations that chains run beside each other.
PAIRS: tuple[tuple[Resource, Resource], ...] = (
    ("inter", "intra"),
    ("inter", "memory"),
    ("intra", "memory"),
)
# Of a pair, the collective takes about so long.
PAIR_US = 20_000.0


def all_points(shape: Shape) -> list[Point]:
    """Every point of a cluster."""
    points: list[Point] = []
    for num_bytes in LADDER_BYTES:
        if shape.num_nodes > 1:
            for part in shape.parts:
                size = shape.num_nodes * part
                points.append(_collective("alltoall", "inter", size, part, num_bytes))
            # Of chains, only `allgather` gathers between nodes, over the whole exchange.
            points.append(_collective("allgather", "inter", size, part, num_bytes))
        for part in shape.parts[1:]:
            points.append(_collective("alltoall", "intra", part, part, num_bytes))
            points.append(_collective("allgather", "intra", part, part, num_bytes))
    points += [
        _in_memory(operation, num_bytes)
        for operation in BYTES_PER_ROW
        for num_bytes in LADDER_IN_MEMORY_BYTES
    ]
    # A row of the largest operations is more than the smallest sizes.
    return list(dict.fromkeys(points))


def choose_pairs(points: Sequence[Point], estimates_us: Sequence[float]) -> list[Pair]:
    """A pair for each two resources.

    Args:
        points: all points.
        estimates_us: of each, in a first run.
    """
    largest = max(point.ranks_on_node for point in points)

    def nearest(resource: Resource, wanted_us: float) -> tuple[Point, float] | None:
        """Among rails between nodes, gathers of a whole node, or copies."""
        operation = {"inter": "alltoall", "intra": "allgather", "memory": "copy"}[resource]
        ranks_on_node = {"inter": 1, "intra": largest, "memory": 1}[resource]
        found = [
            (abs(math.log(estimate_us / wanted_us)), point.num_bytes, point, estimate_us)
            for point, estimate_us in zip(points, estimates_us, strict=True)
            if (point.tier, point.operation) == (resource, operation)
            and point.ranks_on_node == ranks_on_node
        ]
        return min(found)[2:] if found else None

    pairs = []
    for first, second in PAIRS:
        one, other = nearest(first, PAIR_US), nearest(second, PAIR_US / 4)
        if one is not None and other is not None:
            repeats = max(round(one[1] / other[1]), 1)
            pairs.append(Pair(first=one[0], second=other[0], repeats=repeats))
    return pairs


def _collective(
    operation: Operation, tier: Tier, group_size: int, ranks_on_node: int, num_bytes: int
) -> Point:
    peers = group_size - ranks_on_node if tier == "inter" else ranks_on_node - 1
    num_rows = max(round(num_bytes / (peers * MESSAGE_ROW_BYTES)), 1)
    return Point(
        operation=operation,
        tier=tier,
        group_size=group_size,
        ranks_on_node=ranks_on_node,
        num_rows=num_rows,
        num_bytes=num_rows * peers * MESSAGE_ROW_BYTES,
    )


def _in_memory(operation: Operation, num_bytes: int) -> Point:
    row_bytes = BYTES_PER_ROW[operation]
    num_rows = max(num_bytes // row_bytes, 1)
    return Point(
        operation=operation,
        tier="memory",
        group_size=1,
        ranks_on_node=1,
        num_rows=num_rows,
        num_bytes=num_rows * row_bytes,
    )
