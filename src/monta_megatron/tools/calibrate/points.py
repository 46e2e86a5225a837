"""What is measured on a cluster of a given shape: a short list of points. No torch.

A point is one operation at one size, by all ranks at once, as in a real exchange: every rail at
the same time, every node at the same time. A pair is two points that run at once.

Groups with d ranks on each of N nodes of R ranks, for d = 1, 2, 4, ... and R:

    inter   N * d ranks; at d = 1 the rails, at d = R the whole exchange, in between the EP
            groups where expert tensor parallelism inside the node is R / d
    intra   d consecutive ranks of a node; at d = R the node, below that ETP groups
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from monta_megatron.chains.program import Resource
from monta_megatron.planner.curves import Operation
from monta_megatron.planner.host_costs import FINDS
from monta_megatron.planner.traffic import (
    COUNT_MAP_BYTES,
    FIND_PASSES,
    FIND_VALUE_BYTES,
    LIST_MAP_BYTES,
)

# Sizes per rank: far apart, and none a power of two, as sizes in real exchanges hardly ever are; up
# to the largest of real exchanges, which on CPU ranks are 5 MiB between nodes, 20 inside, 80 in
# memory, and on a GPU 320 MiB, and 1.25 GiB in memory. Those of experts' ids are short everywhere.
FIRST_BYTES, FIRST_BYTES_IN_MEMORY = 5 * 1024, 20 * 1024
NUM_SIZES: dict[str, dict[Resource, int]] = {
    "cpu": {"inter": 6, "intra": 7, "memory": 7},
    "cuda": {"inter": 9, "intra": 9, "memory": 9},
}
NUM_SIZES_OF_IDS = 6
# A message is made of rows of this size, so that it can be split for any number of peers.
MESSAGE_ROW_BYTES = 16

# The rows of operations in memory, and the expert ids that come with them.
HIDDEN_ROW_BYTES = 4096
NUM_EXPERTS = 64
TOPK = 8
# Copies of a row that a sum adds up.
NUM_COPIES = 2

# Bytes read and written per row, counted as in planner.traffic.
BYTES_PER_ROW: dict[Operation, int] = {
    "copy": 2 * HIDDEN_ROW_BYTES,
    "put": 2 * HIDDEN_ROW_BYTES,
    "sum": (NUM_COPIES + 1) * HIDDEN_ROW_BYTES,
    "find": FIND_PASSES["find"] * FIND_VALUE_BYTES * TOPK,
    "find_lists": FIND_PASSES["find_lists"] * FIND_VALUE_BYTES * TOPK,
    "count": COUNT_MAP_BYTES * NUM_EXPERTS,
    "lists": LIST_MAP_BYTES * NUM_EXPERTS,
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
        resource: what the bytes go through.
        group_size: ranks that take part; 1 for operations in memory.
        ranks_on_node: how many of them are on each node.
        num_rows: rows to every peer, or in memory.
        num_bytes: bytes per rank that it sends through it, or that it reads and writes.
    """

    operation: Operation
    resource: Resource
    group_size: int
    ranks_on_node: int
    num_rows: int
    num_bytes: int

    @property
    def name(self) -> str:
        """The name that it is recorded under."""
        return f"{self.operation} {self.resource} {self.group_size} {self.num_bytes}"

    @property
    def name_of_first(self) -> str:
        """The name for the first of several runs in a row, where that is recorded separately."""
        return f"{self.name}, first"

    @property
    def is_collective(self) -> bool:
        """Whether other ranks take part."""
        return self.resource != "memory"


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """An operation several times in a row: half of a pair, timed by itself.

    Attributes:
        point: the operation.
        repeats: how often.
        other: the resource of the pair's other half.
    """

    point: Point
    repeats: int
    other: Resource

    @property
    def name(self) -> str:
        """The name that it is recorded under."""
        return f"{self.repeats} x {self.point.name}, without {self.other}"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A collective, while an operation on another resource runs several times.

    Attributes:
        first: the collective.
        second: the other operation.
    """

    first: Repeated
    second: Repeated

    @property
    def name(self) -> str:
        """The name that it is recorded under."""
        first, second = self.first, self.second
        return f"{first.point.name} beside {second.repeats} x {second.point.name}"


@dataclass(frozen=True, kw_only=True)
class Contenders:
    """Two pairs of the same operations, which show by how much each slows the other.

    Attributes:
        short: the pair whose second operation ends long before the first.
        long: the pair whose second operation goes on long after the first.
    """

    short: Pair
    long: Pair

    @property
    def tasks(self) -> tuple["Task", ...]:
        """What is timed: each alone and both together, right after each other in every round."""
        pairs = [(pair.second, pair) for pair in (self.short, self.long)]
        # Where even one run of the second operation takes too long, both pairs are the same.
        return tuple(dict.fromkeys([self.short.first, *pairs[0], *pairs[1]]))


@dataclass(frozen=True, kw_only=True)
class HostWork:
    """What the host does around the stages of an exchange: no collective, a handful of rows.

    Attributes:
        name: the name that it is recorded under.
    """

    name: str


# Reading counts and binding, for an exchange of all ranks; once per dispatch.
COUNTS = HostWork(name="host counts")
# The four passes, by executor and autograd, of a rank with itself: in one chunk, and in several.
PASSES = HostWork(name="host passes")
NUM_PASS_CHUNKS = 8
PASSES_IN_CHUNKS = HostWork(name=f"host passes, {NUM_PASS_CHUNKS} chunks")
# Number of stages in each of these passes.
NUM_PASS_STAGES = 4

Task: TypeAlias = Point | Repeated | Pair | HostWork

# Pairs of resources whose mutual slowdown is measured, with operations that chains run at once.
PAIRS: tuple[tuple[Resource, Resource], ...] = (
    ("inter", "intra"),
    ("inter", "memory"),
    ("intra", "memory"),
)
# About how long a pair's collective takes; the other half takes this many times less, or longer.
PAIR_US = 60_000.0
SHORTER = 2


def all_points(shape: Shape, num_sizes: Mapping[Resource, int]) -> list[Point]:
    """Every point of a cluster, as many sizes as its resource has, in steps of 4x."""
    points: list[Point] = []
    parts = shape.parts
    for num_bytes in (FIRST_BYTES * 4**step for step in range(num_sizes["inter"])):
        if shape.num_nodes > 1:
            for part in parts:
                size = shape.num_nodes * part
                points.append(_collective("alltoall", "inter", size, part, num_bytes))
            # `allgather` gathers over the whole exchange; hardly any other chain gathers across.
            size = shape.num_nodes * parts[-1]
            points.append(_collective("allgather", "inter", size, parts[-1], num_bytes))
    for num_bytes in (FIRST_BYTES * 4**step for step in range(num_sizes["intra"])):
        for part in parts[1:]:
            points.append(_collective("alltoall", "intra", part, part, num_bytes))
            points.append(_collective("allgather", "intra", part, part, num_bytes))
    for operation in BYTES_PER_ROW:
        most = NUM_SIZES_OF_IDS if operation in FINDS else num_sizes["memory"]
        points += [_in_memory(operation, FIRST_BYTES_IN_MEMORY * 4**step) for step in range(most)]
    # One row of the largest operations exceeds the smallest sizes, which makes duplicates.
    return list(dict.fromkeys(points))


def choose_pairs(points: Sequence[Point], estimates_us: Sequence[float]) -> list[Contenders]:
    """The two pairs of points for each of `PAIRS`, where there are such points.

    Args:
        points: all points.
        estimates_us: time of each, from its first runs.
    """
    largest = max(point.ranks_on_node for point in points)

    def nearest(resource: Resource, wanted_us: float) -> tuple[Point, float] | None:
        """The nearest in time among rails between nodes, gathers of a whole node, or copies."""
        operation = {"inter": "alltoall", "intra": "allgather", "memory": "copy"}[resource]
        ranks_on_node = {"inter": 1, "intra": largest, "memory": 1}[resource]
        candidates = [
            (abs(math.log(estimate_us / wanted_us)), point.num_bytes, point, estimate_us)
            for point, estimate_us in zip(points, estimates_us, strict=True)
            if (point.resource, point.operation) == (resource, operation)
            and point.ranks_on_node == ranks_on_node
        ]
        return min(candidates)[2:] if candidates else None

    pairs: list[Contenders] = []
    for first, second in PAIRS:
        one, other = nearest(first, PAIR_US), nearest(second, PAIR_US / 4)
        if one is not None and other is not None:
            ratio = one[1] / other[1]
            alone = Repeated(point=one[0], repeats=1, other=second)
            short, long = (
                Pair(
                    first=alone,
                    second=Repeated(point=other[0], repeats=max(round(times), 1), other=first),
                )
                for times in (ratio / SHORTER, ratio * SHORTER)
            )
            pairs.append(Contenders(short=short, long=long))
    return pairs


def _collective(
    operation: Operation, resource: Resource, group_size: int, ranks_on_node: int, num_bytes: int
) -> Point:
    peers = group_size - ranks_on_node if resource == "inter" else ranks_on_node - 1
    num_rows = max(round(num_bytes / (peers * MESSAGE_ROW_BYTES)), 1)
    return Point(
        operation=operation,
        resource=resource,
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
        resource="memory",
        group_size=1,
        ranks_on_node=1,
        num_rows=num_rows,
        num_bytes=num_rows * row_bytes,
    )
