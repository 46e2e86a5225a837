"""Cost curves of operations by bytes, and host costs of starting them.

Between its points a curve is interpolated in the logarithms of both, as costs bend over decades.
Beyond its ends it continues as a line, alpha + bytes * beta, through the end point with the slope
that best fits the last points at that end; this is an extrapolation and is reported as one.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from statistics import linear_regression
from typing import Annotated, Literal, TypeAlias, get_args

from monta_megatron.chains.program import COLLECTIVES, PricedOperation, Resource
from monta_megatron.common.rules import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Rule,
    Text,
    require,
)
from monta_megatron.common.units import Rate

RESOURCES: tuple[Resource, ...] = get_args(Resource)
# Datasheet: published by a vendor or by others who measured it. Measured: on this very cluster.
CostKind: TypeAlias = Literal["measured", "datasheet"]

# Number of points at each end of a curve that the line beyond that end is fitted to.
NUM_END_POINTS = 3

Sizes = Annotated[
    tuple[PositiveInt, ...],
    Rule(
        "at least 2 sizes in ascending order",
        lambda sizes: len(sizes) >= 2 and all(low < high for low, high in pairwise(sizes)),
    ),
]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A line through measured points.

    Attributes:
        alpha_us: time at 0 bytes.
        rate: its slope.
        largest_residual: the largest relative distance of a point from the line.
    """

    alpha_us: NonNegativeFloat
    rate: Rate
    largest_residual: NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Cost of one operation for one group size, with every rank of a node busy with it.

    Attributes:
        operation: what was timed; docs/calibration.md explains each.
        resource: the resource through which the bytes go.
        group_size: ranks that take part; 1 for operations in memory.
        sizes_bytes: ascending; bytes that leave each rank through it, or that an operation in
            memory reads and writes.
        times_us: the time for each size.
        kind: whether it was measured on this cluster.
        source: what it was measured with, or where it was published.
        fit: a line through the points, for the reader; only the points are used.
    """

    operation: PricedOperation
    resource: Resource
    group_size: PositiveInt
    sizes_bytes: Sizes
    times_us: tuple[PositiveFloat, ...]
    kind: CostKind
    source: Text
    fit: Fit | None = None

    def __post_init__(self) -> None:
        num_times, num_sizes = len(self.times_us), len(self.sizes_bytes)
        rule = f"be as many as sizes_bytes ({num_sizes})"
        require(num_times == num_sizes, "times_us", f"{num_times} times", rule)

    def covers(self, num_bytes: float) -> bool:
        """Whether a size lies within the range of the points."""
        return self.sizes_bytes[0] <= num_bytes <= self.sizes_bytes[-1]

    def time_us(self, num_bytes: float) -> float:
        """Time for a size, inside the curve or beyond its ends."""
        sizes, times = self.sizes_bytes, self.times_us
        if num_bytes <= sizes[0]:
            return times[0] - self.slopes[0] * (sizes[0] - num_bytes)
        if num_bytes >= sizes[-1]:
            return times[-1] + self.slopes[1] * (num_bytes - sizes[-1])
        above = bisect_right(sizes, num_bytes)
        log_sizes, log_times = self._logarithms
        low, high = log_sizes[above - 1], log_sizes[above]
        part = (math.log(num_bytes) - low) / (high - low)
        return math.exp(log_times[above - 1] + part * (log_times[above] - log_times[above - 1]))

    @cached_property
    def _logarithms(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return tuple(map(math.log, self.sizes_bytes)), tuple(map(math.log, self.times_us))

    @cached_property
    def slopes(self) -> tuple[float, float]:
        """us per byte below the first point and beyond the last; no time falls below 0."""
        first, last = (
            linear_regression(self.sizes_bytes[end], self.times_us[end]).slope
            for end in (slice(NUM_END_POINTS), slice(-NUM_END_POINTS, None))
        )
        return min(max(first, 0.0), self.times_us[0] / self.sizes_bytes[0]), max(last, 0.0)


# Operations on the routing map and on expert ids, made of many short steps.
FINDS: tuple[PricedOperation, ...] = ("find", "find_lists", "count", "lists")


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Host time to start an operation, for each stage and chunk, and around the stages.

    Attributes:
        collective_us: to start an AllToAll or AllGather, whatever its group.
        collective_peer_us: as much more for each other rank of the group.
        operation_us: to hand one operation on tensors to the device, its launch included; what a
            stage takes of them is in `planner.traffic`. Needed where one of `copy_us`,
            `sum_us` and `find_us` is not given.
        copy_us: to start a copy of rows, whatever its operations; none takes `operation_us` for
            each of them.
        sum_us: likewise, a sum over copies.
        find_us: likewise, to count, list expert ids, or find from them what is copied.
        counts_to_host_us: to copy the counts to the host and wait for them.
        counts_us: to count what goes where and bind a chain to it, once per dispatch.
        pass_us: what a pass takes besides its stages: autograd and the executor.
        stage_us: what the executor takes for each stage of each chunk.
        first_collective_us: how much longer the first chunk of a collective's stage takes than
            later ones, whose code is in the host's caches by then.
        first_copy_us: the same for an operation in memory.
        first_find_us: the same for what counts, lists and finds.
        host_speed: how many times as fast as the processor of these figures the cluster's is: all
            of them are divided by it.
        conservative_speed: the least that it may be; none for the same.
        optimistic_speed: the most that it may be; none for the same.
        kind: whether these were measured on this cluster.
        source: what they were measured with, or where they were published.
    """

    collective_us: NonNegativeFloat
    collective_peer_us: NonNegativeFloat = 0.0
    operation_us: NonNegativeFloat | None = None
    copy_us: NonNegativeFloat | None = None
    sum_us: NonNegativeFloat | None = None
    find_us: NonNegativeFloat | None = None
    counts_to_host_us: NonNegativeFloat
    counts_us: NonNegativeFloat = 0.0
    pass_us: NonNegativeFloat = 0.0
    stage_us: NonNegativeFloat = 0.0
    first_collective_us: NonNegativeFloat = 0.0
    first_copy_us: NonNegativeFloat = 0.0
    first_find_us: NonNegativeFloat = 0.0
    host_speed: PositiveFloat = 1.0
    conservative_speed: PositiveFloat | None = None
    optimistic_speed: PositiveFloat | None = None
    kind: CostKind
    source: Text

    def __post_init__(self) -> None:
        if self.operation_us is None and None in (self.copy_us, self.sum_us, self.find_us):
            raise ValueError(
                "operation_us: missing, must be given, or copy_us, sum_us and find_us instead"
            )
        for name, is_end, rule in (
            ("conservative_speed", lambda speed: speed <= self.host_speed, "at most"),
            ("optimistic_speed", lambda speed: speed >= self.host_speed, "at least"),
        ):
            speed = getattr(self, name)
            if speed is not None:
                require(is_end(speed), name, speed, f"be {rule} host_speed, {self.host_speed:g}")

    @cached_property
    def at_speed(self) -> "HostCosts":
        """The same costs as this host has them: of speed 1."""
        if self.host_speed == 1:
            return self
        scaled = {
            entry.name: value / self.host_speed
            for entry in fields(self)
            if entry.name.endswith("_us") and (value := getattr(self, entry.name)) is not None
        }
        costs = replace(self, conservative_speed=None, optimistic_speed=None, host_speed=1.0)
        return replace(costs, **scaled)

    def start_us(
        self, operation: PricedOperation, num_host_operations: float, num_peers: int = 0
    ) -> float:
        """Host time to start one operation.

        Args:
            operation: what is started.
            num_host_operations: operations on tensors that it consists of.
            num_peers: other ranks of a collective's group.
        """
        of_operations_us = (self.operation_us or 0.0) * num_host_operations
        if operation in COLLECTIVES:
            return self.collective_us + self.collective_peer_us * num_peers + of_operations_us
        given_us = self.sum_us if operation == "sum" else self.copy_us
        if operation in FINDS:
            given_us = self.find_us
        return of_operations_us if given_us is None else given_us

    def first_us(self, operation: PricedOperation) -> float:
        """Excess time of the first chunk of a stage over later ones."""
        if operation in COLLECTIVES:
            return self.first_collective_us
        return self.first_find_us if operation in FINDS else self.first_copy_us
