"""Counts, sizes, times and rates as text and as numbers: 1 GB is 1e9 bytes, a rate has its unit."""

import math
import re
from dataclasses import dataclass
from typing import ClassVar


def counted(number: int, noun: str) -> str:
    """1, "chunk" -> "1 chunk"; 4096, "token" -> "4,096 tokens"; nouns with a plural in s or es."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}" + ("" if number == 1 else plural)


def size_text(num_bytes: float | None) -> str:
    """Bytes in three digits and a unit; "-" for none."""
    if not num_bytes:
        return "-"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            number = num_bytes / size
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def time_text(time_us: float, beside_us: float = 0.0) -> str:
    """A time in three digits and us, ms or s: the unit of the larger of it and `beside_us`."""
    largest_us = max(time_us, beside_us)
    unit, size = ("us", 1.0) if largest_us < 999.5 else ("ms", 1e3)
    if largest_us >= 999.5e3:
        unit, size = "s", 1e6
    time = time_us / size
    return f"{time:.3g} {unit}" if time < 99.5 else f"{time:,.0f} {unit}"


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
        if not 0 < self.gbytes_per_s < math.inf:
            raise ValueError(f"rate: got {self.gbytes_per_s} GB/s, must be a number > 0")

    @classmethod
    def from_text(cls, text: str) -> "Rate":
        """Read "100 Gb/s", "100 Gbit/s", "100 Gbps" or "12.5 GB/s".

        Raises:
            ValueError: the text is no number above 0 with such a unit.
        """
        match = _RATE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"rate: got {text!r}, must be {cls.RULE}")
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
