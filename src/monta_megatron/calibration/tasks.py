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
from monta_megatron.chains.chain import BoundChain
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
# Bytes read and written per row; `planner.cluster` says what stands in for other operations.
IN_MEMORY: dict[PricedOperation, int] = {
    "copy": 2 * HIDDEN_ROW_BYTES,
    "sum": (NUM_COPIES + 1) * HIDDEN_ROW_BYTES,
}

# Sizes per rank, up to those of real exchanges; far apart, and no powers of two, as sizes of real
# exchanges hardly ever are.
FIRST_BYTES: dict[Resource, int] = {"inter": 5 << 10, "intra": 5 << 10, "memory": 20 << 10}
LAST_BYTES: dict[str, dict[Resource, int]] = {
    "cpu": {"inter": 5 << 20, "intra": 20 << 20, "memory": 80 << 20},
    "cuda": {"inter": 320 << 20, "intra": 320 << 20, "memory": 1280 << 20},
}
SIZE_FACTOR = 4
# Tokens of host work.
NUM_TOKENS = 128
# A curve has no fewer, whatever they take.
LEAST_SIZES = 3
# The most that a pair's collective takes: as long as the chunk of a real exchange on CPU ranks,
# where a shorter one measures the latency of the scheduler.
PAIR_US = 100_000.0
SHORT, LONG = 0.5, 2.0


class Point(NamedTuple):
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


class Passes(NamedTuple):
    """Host work: all four passes of a rank with itself, on a handful of rows."""

    num_chunks: int

    def bind(self) -> BoundChain:
        """The chain of these passes, in which a chunk has rows of two experts to put in order."""
        layout = Layout(ep=1, etp=1, num_local_experts=2, rank=0, nodes=(0,))
        sent = np.full((1, 2), NUM_TOKENS // 2)
        counts = Counts(sent=sent, received=sent[None])
        return CHAINS["alltoall_allgather"].bind(layout, counts, self.num_chunks)

    def operations(self, policy: Policy) -> tuple[int, float]:
        """How many operations all passes have, and how many the host enqueues for them."""
        bound, row = self.bind(), RowFormat(hidden_size=1, value_bytes=4, prob_bytes=4, sum_bytes=4)
        enqueued = [
            num_host_operations(operation.kind, pass_, row, policy, self.num_chunks)
            for pass_ in FORWARD_BACKWARD
            for operation in lower(bound, pass_, row, 1, policy).program.operations
        ]
        return len(enqueued), sum(enqueued)


PASSES, CHUNKED_PASSES = Passes(num_chunks=1), Passes(num_chunks=8)

Task: TypeAlias = Point | Passes


class Sample(NamedTuple):
    """Times of one run of a task.

    Attributes:
        us: from the start to the result.
        launch_us: the part of it until the host was free again.
    """

    us: float
    launch_us: float


class Pair(NamedTuple):
    """A collective beside runs of an operation on another resource.

    Attributes:
        first: the collective.
        second: the other operation.
        length: of all runs of the second, as a multiple of the first's.
    """

    first: Point
    second: Point
    length: float


def etp_sizes(ranks_per_node: int) -> list[int]:
    """Powers of two that divide R, and R; 12 -> [1, 2, 4, 12]."""
    powers = (1 << power for power in range(ranks_per_node.bit_length()))
    return sorted({ranks_per_node, *(size for size in powers if ranks_per_node % size == 0)})


def points_of(layout: Layout, device: str) -> list[Point]:
    """All points of a cluster, curve by curve in ascending sizes.

    Args:
        layout: the exchange of all ranks.
        device: type of the ranks' devices.
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
    curves += [(operation, "memory", 1, row_bytes) for operation, row_bytes in IN_MEMORY.items()]
    points = []
    for operation, resource, group_size, row_bytes in sorted(curves, key=lambda of: of[1]):
        num_bytes = FIRST_BYTES[resource]
        while num_bytes <= LAST_BYTES[device][resource]:
            num_rows = max(round(num_bytes / row_bytes), 1)
            points.append(Point(operation, resource, group_size, num_rows, row_bytes))
            num_bytes *= SIZE_FACTOR
    return points


def choose_pairs(times_us: Mapping[Point, float]) -> list[tuple[Pair, Pair]]:
    """Pairs of operations that chains run at once: rails, gathers of a node, copies.

    Args:
        times_us: of each point that was timed, curve by curve in ascending sizes.

    Returns:
        For each two of them that the cluster has, a pair whose second operation ends long before
        the first and one in which it goes on long after it.
    """
    curves = {key: list(points) for key, points in groupby(times_us, lambda point: point.curve)}
    rails = [curves[key] for key in sorted(curves) if key[:2] == ("inter", "alltoall")]
    nodes = [curves[key] for key in sorted(curves) if key[:2] == ("intra", "allgather")]
    halves = [*rails[:1], *nodes[-1:], curves["memory", "copy", 1]]
    pairs = []
    for firsts, seconds in combinations(halves, 2):
        fitting = [point for point in firsts if times_us[point] <= PAIR_US]
        # The second is a small one, so that its runs can take any time.
        first, second = (fitting or firsts)[-1], seconds[-LEAST_SIZES]
        pairs.append((Pair(first, second, SHORT), Pair(first, second, LONG)))
    return pairs
