"""What a calibration times: operations of several sizes, pairs of them, host work. No torch.

Groups with d ranks on each of N nodes of R ranks, for d = 1, 2, 4, ... and R:

    inter   N x d ranks: rails at d = 1, all ranks at d = R, in between the EP groups where expert
            tensor parallelism inside the node is R / d
    intra   d consecutive ranks of a node: the node at d = R, below that ETP groups

All groups of a kind work at once, as in an exchange: every rail, every node.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from typing import NamedTuple, TypeAlias

from monta_megatron.chains.program import COLLECTIVES, PricedOperation, Resource
from monta_megatron.planner.traffic import FIND_PASSES, FIND_VALUE_BYTES, find_bytes

# A message is made of rows of this size, so that it can be split for any number of peers.
MESSAGE_ROW_BYTES = 16
# Rows of operations in memory, the experts of each, and its copies.
HIDDEN_ROW_BYTES, NUM_EXPERTS, TOPK, NUM_COPIES = 4096, 64, 8, 4

# Sizes per rank, up to those of real exchanges; far apart, and no powers of two, as sizes of real
# exchanges hardly ever are.
FIRST_BYTES: dict[Resource, int] = {"inter": 5 << 10, "intra": 5 << 10, "memory": 20 << 10}
LAST_BYTES: dict[str, dict[Resource, int]] = {
    "cpu": {"inter": 5 << 20, "intra": 20 << 20, "memory": 80 << 20},
    "cuda": {"inter": 320 << 20, "intra": 320 << 20, "memory": 1280 << 20},
}
# Of expert ids, which are few.
LAST_BYTES_OF_FIND = 20 << 20
SIZE_FACTOR = 4


@dataclass(frozen=True, kw_only=True)
class Point:
    """One operation of one size.

    Attributes:
        operation: its name.
        resource: the resource through which the bytes go.
        group_size: ranks that take part; 1 for operations in memory.
        num_rows: rows to every peer, or in memory.
        row_bytes: bytes through the resource for each of them: of a rank's messages to all peers
            there, or read and written.
    """

    operation: PricedOperation
    resource: Resource
    group_size: int
    num_rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes that leave each rank through the resource, or that it reads and writes."""
        return self.num_rows * self.row_bytes

    @property
    def curve(self) -> tuple[Resource, PricedOperation, int]:
        """Fields shared by all points of a curve."""
        return self.resource, self.operation, self.group_size


class HostWork(Enum):
    """Host work around the stages of an exchange, on a handful of rows."""

    COUNTS = "reading counts and binding a chain"
    PASSES = "four passes of a rank with itself, in one chunk"
    CHUNKED_PASSES = "the same, in several chunks"


NUM_PASS_CHUNKS = 8
# Stages of each of these passes.
NUM_PASS_STAGES = 4

Task: TypeAlias = Point | HostWork


class Sample(NamedTuple):
    """Times of one run of a task.

    Attributes:
        us: from the start to the result.
        launch_us: the part of it until the host was free again.
    """

    us: float
    launch_us: float


class Pair(NamedTuple):
    """A collective beside an operation on another resource.

    Attributes:
        first: the collective.
        second: the other operation.
        repeats: how many times the second runs beside one run of the first.
    """

    first: Point
    second: Point
    repeats: int


def node_parts(ranks_per_node: int) -> list[int]:
    """Ranks of a node in one group: powers of two that divide R, and R; 12 -> [1, 2, 4, 12]."""
    powers = (1 << power for power in range(ranks_per_node.bit_length()))
    return sorted({ranks_per_node, *(part for part in powers if ranks_per_node % part == 0)})


def points_of(num_nodes: int, ranks_per_node: int, device: str, fused: bool) -> list[Point]:
    """All points of a cluster, curve by curve in ascending sizes.

    Args:
        num_nodes: N.
        ranks_per_node: R.
        device: type of the ranks' devices.
        fused: Triton kernels copy and sum rows, not PyTorch's operations.
    """
    # Operation, resource, ranks of a group, bytes of a row.
    curves: list[tuple[PricedOperation, Resource, int, int]] = [
        (operation, "memory", 1, row_bytes) for operation, row_bytes in bytes_per_row(fused).items()
    ]
    for part in node_parts(ranks_per_node):
        if part > 1:
            row_bytes = (part - 1) * MESSAGE_ROW_BYTES
            curves += [(operation, "intra", part, row_bytes) for operation in COLLECTIVES]
        if num_nodes > 1:
            row_bytes = (num_nodes - 1) * part * MESSAGE_ROW_BYTES
            curves.append(("alltoall", "inter", num_nodes * part, row_bytes))
    if num_nodes > 1:
        # Only the chain `allgather` gathers across nodes, and it does so from all ranks.
        curves.append(("allgather", *curves[-1][1:]))
    points = []
    for operation, resource, group_size, row_bytes in curves:
        num_bytes = FIRST_BYTES[resource]
        most = LAST_BYTES_OF_FIND if operation == "find" else LAST_BYTES[device][resource]
        while num_bytes <= most:
            points.append(
                Point(
                    operation=operation,
                    resource=resource,
                    group_size=group_size,
                    num_rows=max(round(num_bytes / row_bytes), 1),
                    row_bytes=row_bytes,
                )
            )
            num_bytes *= SIZE_FACTOR
    return points


def bytes_per_row(fused: bool) -> dict[PricedOperation, int]:
    """Bytes read and written per row of each operation in memory, as `planner.traffic` counts."""
    found = FIND_PASSES["find"] * FIND_VALUE_BYTES * TOPK
    return {
        "copy": 2 * HIDDEN_ROW_BYTES,
        "sum": (NUM_COPIES + 1) * HIDDEN_ROW_BYTES,
        "find": int(find_bytes(TOPK, 1.0, NUM_COPIES)) if fused else found,
    }


# The most that a pair's collective takes; the other operation takes this many times less or more.
PAIR_US, SHORTER = 60_000.0, 2


def choose_pairs(times_us: Mapping[Point, float]) -> list[tuple[Pair, Pair]]:
    """Pairs of operations that chains run at once: rails, gathers of a node, copies.

    Args:
        times_us: of each point.

    Returns:
        For each two of them that the cluster has, a pair whose second operation ends long before
        the first and one in which it goes on long after it.
    """
    halves: tuple[tuple[Resource, PricedOperation, Callable[..., int]], ...] = (
        ("inter", "alltoall", min),
        ("intra", "allgather", max),
        ("memory", "copy", max),
    )
    curves = []
    for resource, operation, choose in halves:
        points = [point for point in times_us if point.curve[:2] == (resource, operation)]
        size = choose((point.group_size for point in points), default=0)
        curves.append([point for point in points if point.group_size == size])

    def largest(points: Sequence[Point], most_us: float) -> Point:
        fitting = [point for point in points if times_us[point] <= most_us]
        return max(fitting, key=lambda point: point.num_bytes) if fitting else points[0]

    pairs = []
    for firsts, seconds in combinations(filter(None, curves), 2):
        first = largest(firsts, PAIR_US)
        second = largest(seconds, times_us[first] / 4)
        ratio = times_us[first] / times_us[second]
        short, long = (max(round(ratio * times), 1) for times in (1 / SHORTER, SHORTER))
        pairs.append((Pair(first, second, short), Pair(first, second, long)))
    return pairs
