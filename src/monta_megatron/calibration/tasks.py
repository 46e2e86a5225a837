"""What a calibration times: operations of several sizes, pairs of them, host work. No torch.

The groups are those of an exchange of all ranks, with ETP groups of 1, 2, 4, ... and R of the R
ranks of a node. All groups of a kind work at once, as in an exchange: every rail, every node.

    inter   EP groups: all ranks at ETP 1, rails at ETP R
    intra   ETP groups: the node at ETP R
"""

from collections.abc import Mapping
from itertools import combinations, groupby
from typing import NamedTuple, TypeAlias

import numpy as np

from monta_megatron.chains import CHAINS, Counts
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import (
    COLLECTIVES,
    FORWARD_BACKWARD,
    Policy,
    PricedOperation,
    Resource,
    RowFormat,
)
from monta_megatron.core import Layout
from monta_megatron.planner.traffic import num_host_operations

# A message is made of rows of this size, so that it can be split for any number of peers.
MESSAGE_ROW_BYTES = 16
# A hidden row, and its copies in a sum.
HIDDEN_ROW_BYTES, NUM_COPIES = 4096, 4
# Rows read and written for each; `planner.cluster` says what stands in for other operations.
IN_MEMORY: dict[PricedOperation, int] = {"copy": 2, "sum": NUM_COPIES + 1}

# Bytes per rank of the first size, and how many sizes there are, up to those of real exchanges; far
# apart, and no powers of two, as sizes of real exchanges hardly ever are.
FIRST_BYTES: dict[Resource, int] = {"inter": 5 << 10, "intra": 5 << 10, "memory": 20 << 10}
NUM_SIZES: dict[str, dict[Resource, int]] = {
    "cpu": {"inter": 6, "intra": 7, "memory": 7},
    "cuda": {"inter": 9, "intra": 9, "memory": 9},
}
SIZE_FACTOR = 4
# Host work is timed on few and short rows, since none of its time should be theirs.
NUM_TOKENS = 128
ALONE = Layout(ep=1, etp=1, num_local_experts=2, rank=0, nodes=(0,))
HOST_CHAIN = CHAINS["alltoall_allgather"]
HOST_ROW = RowFormat(hidden_size=1, value_bytes=4, prob_bytes=4, sum_bytes=4)
# Smallest number of sizes of a curve, however long they take.
MIN_SIZES = 3
# Longest time of a pair's collective: as long as the chunk of a real exchange on CPU ranks,
# where a shorter one measures the latency of the scheduler.
PAIR_US = 100_000.0
# Of all runs of its other operation, as multiples of the collective's.
LENGTHS = 0.5, 2.0


class Point(NamedTuple):
    """One operation of one size.

    Attributes:
        operation: name of the operation.
        resource: resource through which the bytes go.
        group_size: number of ranks that take part; 1 for operations in memory.
        num_rows: number of rows to every peer, or in memory.
        row_bytes: bytes through the resource per row: the messages of a rank to all peers there,
            or the bytes read and written.
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


class Passes(NamedTuple):
    """Host work: a rank alone counts its tokens, binds a chain, and runs all four passes.

    A chunk has rows of two experts to put in order. More ranks, and most other chains, take the
    host hardly longer to count and to bind.
    """

    num_chunks: int

    def operations(self, policy: Policy) -> tuple[int, float]:
        """Number of operations in all passes, and number of those that the host enqueues."""
        sent = np.full((1, 2), NUM_TOKENS // 2)
        bound = HOST_CHAIN.bind(ALONE, Counts(sent=sent, received=sent[None]), self.num_chunks)
        enqueued = [
            num_host_operations(operation.kind, pass_, HOST_ROW, policy, self.num_chunks)
            for pass_ in FORWARD_BACKWARD
            for operation in lower(bound, pass_, HOST_ROW, 1, policy).program.operations
        ]
        return len(enqueued), sum(enqueued)


PASSES, CHUNKED_PASSES = Passes(num_chunks=1), Passes(num_chunks=8)

Task: TypeAlias = Point | Passes


class Sample(NamedTuple):
    """Times of one run of a task.

    Attributes:
        us: time from the start to the result; for an operation on a GPU, the GPU's own time.
        launch_us: host time until the start; for passes, until their chain was bound.
    """

    us: float
    launch_us: float


class Pair(NamedTuple):
    """A collective, and an operation on another resource whose runs go on beside it."""

    first: Point
    second: Point


def etp_sizes(ranks_per_node: int) -> list[int]:
    """Powers of two that divide R, and R; 12 -> [1, 2, 4, 12]."""
    powers = (1 << power for power in range(ranks_per_node.bit_length()))
    return sorted({ranks_per_node, *(size for size in powers if ranks_per_node % size == 0)})


def points_of(layout: Layout, device: str) -> list[Point]:
    """All points of a cluster, curve by curve in ascending sizes.

    Args:
        layout: exchange of all ranks.
        device: device type of the ranks.
    """
    world, on_node = len(layout.nodes), layout.ranks_per_node
    # Operation, resource, ranks of a group, bytes of a row.
    curves: list[tuple[PricedOperation, Resource, int, int]] = []
    for etp in etp_sizes(on_node):
        if etp > 1:
            row_bytes = (etp - 1) * MESSAGE_ROW_BYTES
            curves += [(operation, "intra", etp, row_bytes) for operation in COLLECTIVES]
        if layout.num_nodes > 1:
            row_bytes = (world - on_node) // etp * MESSAGE_ROW_BYTES
            curves.append(("alltoall", "inter", world // etp, row_bytes))
            # Only the chain `allgather` gathers across nodes, and it does so from all ranks.
            if etp == 1:
                curves.append(("allgather", "inter", world, row_bytes))
    curves += [(operation, "memory", 1, n * HIDDEN_ROW_BYTES) for operation, n in IN_MEMORY.items()]
    points = []
    for operation, resource, group_size, row_bytes in sorted(curves, key=lambda curve: curve[1]):
        for number in range(NUM_SIZES[device][resource]):
            first_rows = max(FIRST_BYTES[resource] / row_bytes, 1)
            num_rows = round(first_rows * SIZE_FACTOR**number)
            points.append(Point(operation, resource, group_size, num_rows, row_bytes))
    return points


def choose_pairs(times_us: Mapping[Point, float]) -> list[Pair]:
    """Pairs of operations that chains run at once: rails, gathers of a node, copies.

    One size of each: a cluster has one factor for all sizes, and small operations take their time
    for other things than bytes, which is what contention slows.

    Args:
        times_us: time of each timed point, curve by curve in ascending sizes.
    """
    curves = {key: list(points) for key, points in groupby(times_us, lambda point: point.curve)}
    rails = [curves[key] for key in sorted(curves) if key[:2] == ("inter", "alltoall")]
    nodes = [curves[key] for key in sorted(curves) if key[:2] == ("intra", "allgather")]
    halves = [*rails[:1], *nodes[-1:], curves["memory", "copy", 1]]
    pairs = []
    for firsts, seconds in combinations(halves, 2):
        first = next((point for point in reversed(firsts) if times_us[point] <= PAIR_US), firsts[0])
        # The second runs as often as it takes to be as long as the first.
        pairs.append(Pair(first, seconds[-MIN_SIZES]))
    return pairs
