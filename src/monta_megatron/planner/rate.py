"""A rate as files hold it: a number with its unit, so that bits are not taken for bytes."""

import math
import re
from dataclasses import dataclass
from typing import ClassVar

# Decimal prefixes, as multiples of G.
_PREFIXES = {"K": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3}
_RATE = re.compile(r"(\d+(?:\.\d+)?(?:[eE][-+]?\d+)?) *([KMGT])([bB])/s", re.ASCII)


@dataclass(frozen=True)
class Rate:
    """Payload per second, in one direction.

    Attributes:
        gbytes_per_s: 1e9 bytes per second.
    """

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
        """Read "100 Gb/s" or "12.5 GB/s".

        Raises:
            ValueError: the text is no number above 0 with such a unit.
        """
        match = _RATE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"rate: got {text!r}, must be {cls.RULE}")
        number, prefix, unit = match.groups()
        return cls(float(number) * _PREFIXES[prefix] / (8 if unit == "b" else 1))

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
