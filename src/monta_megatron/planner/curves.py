"""Cost curves: how long an operation takes for a number of bytes, by points or a line.

Between its points a curve is interpolated in the logarithms of both, as costs bend over decades.
Beyond its ends it continues as a line, alpha + bytes * beta, through the end point with the slope
that best fits the last points at that end; this is an extrapolation and is reported as one.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import linear_regression
from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from monta_megatron.chains.program import PricedOperation, Resource
from monta_megatron.common.rules import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Rule,
    Text,
    require,
)
from monta_megatron.common.units import Rate

Operation: TypeAlias = PricedOperation
RESOURCES: tuple[Resource, ...] = get_args(Resource)
# Datasheet: published by a vendor or by others who measured it. Measured: on this very cluster.
Kind: TypeAlias = Literal["measured", "datasheet"]

# What is said about the key that held rates before they had units.
OLD_RATE = {"gbps": "write rate: {0} GB/s, or rate: {0} Gb/s if these are bits"}

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

    OLD_KEYS: ClassVar[dict[str, str]] = OLD_RATE


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one operation costs for one group size, with every rank of a node busy with it.

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

    operation: Operation
    resource: Resource
    group_size: PositiveInt
    sizes_bytes: Sizes
    times_us: tuple[PositiveFloat, ...]
    kind: Kind
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
