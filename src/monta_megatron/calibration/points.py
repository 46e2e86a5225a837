"""Points to measure on a cluster, or on the groups of an exchange: a short list. No torch.

Groups with d ranks on each of N nodes of R ranks, for d = 1, 2, 4, ... and R:

    inter   N * d ranks; at d = 1 the rails, at d = R the whole exchange, in between the EP
            groups where expert tensor parallelism inside the node is R / d
    intra   d consecutive ranks of a node; at d = R the node, below that ETP groups
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from monta_megatron.calibration.tasks import (
    HIDDEN_ROW_BYTES,
    MESSAGE_ROW_BYTES,
    NUM_COPIES,
    NUM_EXPERTS,
    TOPK,
    Collective,
    Contenders,
    Pair,
    Point,
    Repeated,
)
from monta_megatron.chains.program import PricedOperation, Resource
from monta_megatron.planner.cluster import FINDS
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
SIZE_FACTOR = 4
NUM_SIZES: dict[str, dict[Resource, int]] = {
    "cpu": {"inter": 6, "intra": 7, "memory": 7},
    "cuda": {"inter": 9, "intra": 9, "memory": 9},
}
NUM_SIZES_OF_IDS = 6

# Of an fp32 probability.
PROB_BYTES = 4
# Parts of all experts in which a row of `find` has one of its own, on the average.
FOUND_PARTS = TOPK * (
    1 - math.comb(NUM_EXPERTS - NUM_EXPERTS // TOPK, TOPK) / math.comb(NUM_EXPERTS, TOPK)
)

# Bytes read and written per row, counted as in planner.traffic.
BYTES_PER_ROW: dict[PricedOperation, int] = {
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


def bytes_per_row(fused: bool) -> Mapping[PricedOperation, int]:
    """Bytes read and written per row, where Triton kernels do the work or PyTorch's operations."""
    if not fused:
        return BYTES_PER_ROW
    from monta_megatron.planner.traffic import find_bytes, list_bytes

    found = round(find_bytes(TOPK, 1.0, FOUND_PARTS))
    listed = round(list_bytes(TOPK, PROB_BYTES, float(NUM_EXPERTS), 1.0))
    of_ids: dict[PricedOperation, int] = {
        "find": found,
        "find_lists": found,
        "count": NUM_EXPERTS,
        "lists": listed,
    }
    return {**BYTES_PER_ROW, **of_ids}


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    """Nodes and the ranks on each."""

    num_nodes: int
    ranks_per_node: int

    @property
    def parts(self) -> list[int]:
        """Numbers of a node's ranks in a group: 1, 2, 4, ... that divide R, and R."""
        parts, part = [], 1
        while part < self.ranks_per_node:
            if self.ranks_per_node % part == 0:
                parts.append(part)
            part *= 2
        return [*parts, self.ranks_per_node]


# Pairs of resources whose mutual slowdown is measured, with operations that chains run at once.
PAIRS: tuple[tuple[Resource, Resource], ...] = (
    ("inter", "intra"),
    ("inter", "memory"),
    ("intra", "memory"),
)
# About how long a pair's collective takes; the other half takes this many times less, or longer.
PAIR_US = 60_000.0
SHORTER = 2


class Series(NamedTuple):
    """A collective in groups of one shape: the points of one curve.

    Attributes:
        operation: the collective.
        resource: what the bytes go through.
        group_size: ranks of a group.
        ranks_on_node: how many of them are on each node.
    """

    operation: Collective
    resource: Resource
    group_size: int
    ranks_on_node: int


def series_of_cluster(shape: NodeShape) -> list[Series]:
    """The collectives of every layout that a cluster of this shape may have."""
    parts, series = shape.parts, []
    if shape.num_nodes > 1:
        sizes = [(shape.num_nodes * part, part) for part in parts]
        series += [Series("alltoall", "inter", *size) for size in sizes]
        # `allgather` gathers over the whole exchange; hardly any other chain gathers across.
        series.append(Series("allgather", "inter", *sizes[-1]))
    for part in parts[1:]:
        series.append(Series("alltoall", "intra", part, part))
        series.append(Series("allgather", "intra", part, part))
    return series


def all_points(
    series: Sequence[Series], num_sizes: Mapping[Resource, int], fused: bool = False
) -> list[Point]:
    """The points of these collectives and of all operations in memory.

    Args:
        series: the collectives.
        num_sizes: how many sizes of each resource, in steps of `SIZE_FACTOR`.
        fused: see `bytes_per_row`.
    """
    points = [
        _collective(entry, FIRST_BYTES * SIZE_FACTOR**step)
        for entry in series
        for step in range(num_sizes[entry.resource])
    ]
    for operation, row_bytes in bytes_per_row(fused).items():
        most = NUM_SIZES_OF_IDS if operation in FINDS else num_sizes["memory"]
        sizes = [FIRST_BYTES_IN_MEMORY * SIZE_FACTOR**step for step in range(most)]
        points += [_in_memory(operation, row_bytes, num_bytes) for num_bytes in sizes]
    # One row of the largest operations exceeds the smallest sizes, which makes duplicates.
    return list(dict.fromkeys(points))


def choose_pairs(times_us: Mapping[Point, float], pair_us: float = PAIR_US) -> list[Contenders]:
    """The two pairs of points for each of `PAIRS`, where there are such points.

    Args:
        times_us: of each point, from its first runs.
        pair_us: about how long the collective of a pair takes.
    """
    largest = max(point.ranks_on_node for point in times_us)

    def nearest(resource: Resource, wanted_us: float) -> tuple[Point, float] | None:
        """The nearest in time among rails, gathers of a whole node, or copies."""
        operation = {"inter": "alltoall", "intra": "allgather", "memory": "copy"}
        ranks_on_node = largest if resource == "intra" else 1
        candidates = [
            (abs(math.log(time_us / wanted_us)), point.num_bytes, point, time_us)
            for point, time_us in times_us.items()
            if (point.resource, point.operation) == (resource, operation[resource])
            and point.ranks_on_node == ranks_on_node
        ]
        return min(candidates)[2:] if candidates else None

    pairs: list[Contenders] = []
    for first, second in PAIRS:
        one, other = nearest(first, pair_us), nearest(second, pair_us / 4)
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


def _collective(series: Series, num_bytes: int) -> Point:
    on_node = series.ranks_on_node
    peers = series.group_size - on_node if series.resource == "inter" else on_node - 1
    num_rows = max(round(num_bytes / (peers * MESSAGE_ROW_BYTES)), 1)
    return Point(
        operation=series.operation,
        resource=series.resource,
        group_size=series.group_size,
        ranks_on_node=on_node,
        num_rows=num_rows,
        num_bytes=num_rows * peers * MESSAGE_ROW_BYTES,
    )


def _in_memory(operation: PricedOperation, row_bytes: int, num_bytes: int) -> Point:
    num_rows = max(num_bytes // row_bytes, 1)
    return Point(
        operation=operation,
        resource="memory",
        group_size=1,
        ranks_on_node=1,
        num_rows=num_rows,
        num_bytes=num_rows * row_bytes,
    )
