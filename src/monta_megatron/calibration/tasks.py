"""Tasks of a calibration: single operations, pairs of them, and host work. No torch.

A point is one operation at one size, by all ranks at once, as in a real exchange: every rail at
the same time, every node at the same time. A pair is two points that run at once.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from monta_megatron.chains.program import LINKS, PricedOperation, Resource

Collective: TypeAlias = Literal["alltoall", "allgather"]

# A message is made of rows of this size, so that it can be split for any number of peers.
MESSAGE_ROW_BYTES = 16
# The rows of operations in memory, and the expert ids that come with them.
HIDDEN_ROW_BYTES = 4096
NUM_EXPERTS = 64
TOPK = 8
# Copies of a row that a sum adds up.
NUM_COPIES = 2


@dataclass(frozen=True, kw_only=True)
class Point:
    """One operation at one size.

    Attributes:
        operation: its name.
        resource: what the bytes go through.
        group_size: ranks that take part; 1 for operations in memory.
        ranks_on_node: how many of them are on each node.
        num_rows: rows to every peer, or in memory.
        num_bytes: bytes per rank that it sends through it, or that it reads and writes.
    """

    operation: PricedOperation
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
        return self.resource in LINKS

    @property
    def curve(self) -> tuple[str, str, int]:
        """Fields shared by all points of a curve."""
        return self.resource, self.operation, self.group_size


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
        """Timed tasks: each alone and both together, right after each other in every round."""
        pairs = [(pair.second, pair) for pair in (self.short, self.long)]
        # Where even one run of the second operation takes too long, both pairs are the same.
        return tuple(dict.fromkeys([self.short.first, *pairs[0], *pairs[1]]))


@dataclass(frozen=True, kw_only=True)
class HostWork:
    """Host work around the stages of an exchange: no collective, a handful of rows.

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
HOST_WORK = (COUNTS, PASSES, PASSES_IN_CHUNKS)
# Number of stages in each of these passes.
NUM_PASS_STAGES = 4

Task: TypeAlias = Point | Repeated | Pair | HostWork


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of one task: times of the slowest rank, or, where cores are shared, of a core.

    Attributes:
        task: its name.
        us: from the start to the result; see `calibration.timer` for shared cores.
        launch_us: the part of it until the host was free again.
    """

    task: str
    us: float
    launch_us: float
