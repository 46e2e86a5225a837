"""What is drawn: spans by rank, in rows by resource.

A track is one rank, or the one rank that the cost model prices for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from monta_megatron.common.rules import Text
from monta_megatron.exchange.recording import Span
from monta_megatron.planner.chain_price import RESOURCE_NAMES

# With their names in tables and pictures, in their order there.
RESOURCES_AND_HOST: Mapping[str, str] = {**RESOURCE_NAMES, "host": "host"}
# The resolution of the clocks; smaller differences are rounding.
RESOLUTION_US = 1e-3


def pipeline_name(chain: str, num_chunks: int) -> str:
    """The text for a chain with a number of chunks."""
    return f"{chain} in 1 chunk" if num_chunks == 1 else f"{chain} in {num_chunks} chunks"


@dataclass(frozen=True, kw_only=True)
class Track:
    """The spans of one rank.

    Attributes:
        name: the name to show.
        spans: its spans, in no particular order.
    """

    name: Text
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What ran when, on all ranks.

    Attributes:
        source: where it comes from.
        name: what ran.
        tracks: one per rank, or one for all ranks if predicted.
    """

    source: Literal["recorded", "predicted"]
    name: Text
    tracks: tuple[Track, ...]


def rows_of(spans: Sequence[Span]) -> list[list[Span]]:
    """One resource's spans in as few rows as possible without overlap, the first filled first."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_us, span.end_us)):
        for row in rows:
            if row[-1].end_us <= span.start_us + RESOLUTION_US:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows
