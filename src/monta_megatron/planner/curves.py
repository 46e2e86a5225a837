"""Rates, and cost curves of operations by bytes: rows of a cluster file, and NCCL's published ones.

Between its points a curve is a line, start + bytes / rate: of NCCL's published times these predict
a size from half and twice that size better than a power law does. Beyond its ends it continues
through the end point with the slope that best fits the last points at that end.
"""

import csv
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from statistics import linear_regression
from typing import ClassVar, Literal, TypeAlias, get_args

from monta_megatron.chains.program import COLLECTIVES, PricedOperation, Resource
from monta_megatron.common import files
from monta_megatron.common.errors import UserError
from monta_megatron.common.rules import PositiveFloat, PositiveInt, require

RESOURCES: tuple[Resource, ...] = get_args(Resource)
# As users read them, and as they write them.
RESOURCE_NAMES: Mapping[str, str] = {"inter": "network", "intra": "node link", "memory": "memory"}
ResourceName: TypeAlias = Literal["network", "node_link", "memory"]
BY_NAME: dict[str, Resource] = dict(zip(get_args(ResourceName), RESOURCES, strict=True))
NAMES: dict[Resource, ResourceName] = dict(zip(RESOURCES, get_args(ResourceName), strict=True))
# Number of points at each end of a curve that the line beyond that end is fitted to.
NUM_END_POINTS = 3
# Decimal prefixes, as multiples of G.
_PREFIXES = {"K": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3}
# Gbit/s and Gbps, as networks are sold, are bits; GBps would be anybody's guess.
_RATE = re.compile(r"(\d+(?:\.\d+)?(?:[eE][-+]?\d+)?) *([KMGT])(b/s|B/s|bit/s|bps)", re.ASCII)


@dataclass(frozen=True)
class Rate:
    """Payload in one direction; `gbytes_per_s` counts 1e9 bytes per second."""

    gbytes_per_s: float

    RULE: ClassVar[str] = (
        "a rate with its unit, such as 100 Gb/s (b for bits) or 12.5 GB/s (B for bytes); K, M, G "
        "and T are decimal"
    )

    def __post_init__(self) -> None:
        holds = 0 < self.gbytes_per_s < math.inf
        require(holds, "rate", f"{self.gbytes_per_s} GB/s", "be a number > 0")

    @classmethod
    def from_text(cls, text: str) -> "Rate":
        """Read "100 Gb/s", "100 Gbit/s", "100 Gbps" or "12.5 GB/s".

        Raises:
            UserError: the text is no number above 0 with such a unit.
        """
        match = _RATE.fullmatch(text.strip())
        if match is None:
            raise UserError(f"rate: got {text!r}, must be {cls.RULE}")
        number, prefix, unit = match.groups()
        return cls(float(number) * _PREFIXES[prefix] / (1 if unit == "B/s" else 8))

    def __str__(self) -> str:
        """The text that `from_text` reads back to an equal rate."""
        return f"{self.gbytes_per_s!r} GB/s".replace(".0 ", " ")

    @property
    def in_both_units(self) -> str:
        """For people: "12.5 GB/s (100 Gb/s)"."""
        in_bytes, in_bits = (
            f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"
            for rate in (self.gbytes_per_s, 8 * self.gbytes_per_s)
        )
        return f"{in_bytes} GB/s ({in_bits} Gb/s)"

    def times(self, ratio: float) -> "Rate":
        """The rate, `ratio` times as high."""
        return Rate(self.gbytes_per_s * ratio)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Cost of one operation for one group size, with every rank of a node busy with it.

    Attributes:
        operation: the operation; docs/calibration.md explains all of them.
        resource: the resource through which the bytes go.
        group_size: number of ranks that take part; 1 for operations in memory.
        sizes_bytes: at least 2 sizes in ascending order: bytes that leave each rank through the
            resource, or that an operation in memory reads and writes.
        times_us: time of the operation for each size.
    """

    operation: PricedOperation
    resource: Resource
    group_size: PositiveInt
    sizes_bytes: tuple[PositiveInt, ...]
    times_us: tuple[PositiveFloat, ...]

    RULE: ClassVar[str] = (
        "operation, resource, ranks and at least 2 bytes:us with ascending bytes, such as "
        "alltoall network 8 65536:41.5 1048576:80 (resources: network, node_link, memory)"
    )

    def __post_init__(self) -> None:
        sizes, times = self.sizes_bytes, self.times_us
        holds = len(sizes) >= 2 and all(low < high for low, high in pairwise((0, *sizes)))
        require(holds, "sizes_bytes", list(sizes), "be at least 2 sizes in ascending order")
        holds = len(times) == len(sizes) and all(0 < time < math.inf for time in times)
        require(holds, "times_us", list(times), f"be {len(sizes)} numbers > 0")
        holds = (self.operation in COLLECTIVES) == (self.resource != "memory")
        require(holds, "curves", f"{self.operation} in {self.resource}", "be of that resource")

    @classmethod
    def from_text(cls, text: str) -> "Curve":
        """Read "alltoall network 8 65536:41.5 1048576:80".

        Raises:
            UserError: the text is no such row.
        """
        operation, resource, group_size, *points = text.split()
        known = operation in get_args(PricedOperation) and resource in BY_NAME
        require(known, "curves", text, f"be {cls.RULE}")
        sizes, times = zip(*(point.split(":") for point in points), strict=True)
        return cls(
            operation=operation,  # type: ignore[arg-type]
            resource=BY_NAME[resource],
            group_size=int(group_size),
            sizes_bytes=tuple(map(int, sizes)),
            times_us=tuple(map(float, times)),
        )

    def __str__(self) -> str:
        """The row that `from_text` reads back to an equal curve."""
        points = zip(self.sizes_bytes, self.times_us, strict=True)
        row = " ".join(f"{size}:{time:.12g}" for size, time in points)
        return f"{self.operation} {NAMES[self.resource]} {self.group_size} {row}"

    @property
    def rate(self) -> Rate:
        """Bytes over time at the largest size."""
        return Rate(self.sizes_bytes[-1] * 1e-3 / self.times_us[-1])

    def time_us(self, num_bytes: float) -> float:
        """Time for a size, inside the curve or beyond its ends."""
        sizes, times = self.sizes_bytes, self.times_us
        if num_bytes <= sizes[0]:
            return times[0] - self.slopes[0] * (sizes[0] - num_bytes)
        if num_bytes >= sizes[-1]:
            return times[-1] + self.slopes[1] * (num_bytes - sizes[-1])
        above = bisect_right(sizes, num_bytes)
        part = (num_bytes - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return times[above - 1] + part * (times[above] - times[above - 1])

    @cached_property
    def slopes(self) -> tuple[float, float]:
        """us per byte below the first point and beyond the last; no time falls below 0."""
        first, last = (
            linear_regression(self.sizes_bytes[end], self.times_us[end]).slope
            for end in (slice(NUM_END_POINTS), slice(-NUM_END_POINTS, None))
        )
        return min(max(first, 0.0), self.times_us[0] / self.sizes_bytes[0]), max(last, 0.0)

    @property
    def falls(self) -> bool:
        """Whether a size takes less than a smaller one."""
        return any(next_us < us for us, next_us in pairwise(self.times_us))

    def at_rate(self, ratio: float) -> "Curve":
        """A curve where a byte takes `1 / ratio` of its time on the link.

        The part of a size's time that exceeds its bytes at the curve's last slope stays as it is.
        Starting overlaps most of the transfer, so it is not added; instead, no size becomes faster
        than starting alone, or than it was if that is faster still.
        """
        if ratio == 1:
            return self
        start_us, us_per_byte = self.time_us(0.0), self.slopes[1]
        times = []
        for size, time in zip(self.sizes_bytes, self.times_us, strict=True):
            link_us = min(size * us_per_byte, time)
            times.append(max(time - link_us + link_us / ratio, min(start_us, time)))
        return replace(self, times_us=tuple(rising(times)))


def rising(times_us: Sequence[float]) -> list[float]:
    """Times of ascending sizes without noise: a size takes no longer than a larger one.

    Others on a machine only make runs longer, so the smaller time is the right one.
    """
    return list(accumulate(reversed(times_us), min))[::-1]


# Tables of published times, by GPU, operation and ranks.
PUBLISHED = files.CONFIGS / "clusters" / "curves" / "nccl_in_node.csv"
# What the tables call the operations of a chain; no chain reduces in a collective.
OPERATIONS: dict[str, PricedOperation] = {"alltoall": "alltoall", "all_gather": "allgather"}


@cache
def published_curves() -> dict[str, tuple[Curve, ...]]:
    """NCCL's published times inside a node: GPU -> its curves, by operation and ranks.

    The tables count a rank's part for itself, which leaves no rank: (ranks - 1) / ranks do. Times
    that fall by noise are smoothed.
    """
    points: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    lines = PUBLISHED.read_text(encoding="utf-8").splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        if row["operation"] in OPERATIONS:
            ranks = int(row["ranks"])
            moved = int(row["bytes"]) * (ranks - 1) // ranks
            key = row["gpu"], row["operation"], ranks
            points.setdefault(key, []).append((moved, float(row["us"])))
    curves: dict[str, tuple[Curve, ...]] = {}
    for (gpu, operation, ranks), sizes_and_times in points.items():
        sizes, times = zip(*sizes_and_times, strict=True)
        curve = Curve(
            operation=OPERATIONS[operation],
            resource="intra",
            group_size=ranks,
            sizes_bytes=sizes,
            times_us=tuple(rising(times)),
        )
        curves[gpu] = (*curves.get(gpu, ()), curve)
    return curves
