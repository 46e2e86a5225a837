"""`monta timeline`: stock's row of a trace above ours, and the share of each resource hidden."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monta_megatron.common.errors import UserError
from monta_megatron.common.rules import require
from monta_megatron.common.text import WIDTH, table, time_text
from monta_megatron.planner.curves import RESOURCE_NAMES
from monta_megatron.tools.trace import STOCK, Span, Trace


def total_us(spans: Sequence[Span]) -> float:
    """From the first start to the last end on any rank."""
    return max(span.end_us for span in spans) - min(span.start_us for span in spans)


def overlap_of(spans: Sequence[Span]) -> dict[str, Any]:
    """How much of each resource was hidden by the others in a row: all passes, mean over ranks.

    Returns:
        For JSON, times in us:

        total_us        from the first start to the last end on any rank
        busy_us         resource -> time in which it worked. A collective counts from its start
                        until it has finished, including its waits for peers
        hidden_share    resource -> share of its busy time in which another resource worked too;
                        None where it was never busy
    """
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(span)
    times_us = np.mean([busy_and_hidden_us(rank_spans) for rank_spans in by_rank.values()], axis=0)
    by_resource = dict(zip(RESOURCE_NAMES, times_us.tolist(), strict=True))
    return {
        "total_us": total_us(spans),
        "busy_us": {resource: busy_us for resource, (busy_us, _) in by_resource.items()},
        "hidden_share": {
            resource: hidden_us / busy_us if busy_us > 0 else None
            for resource, (busy_us, hidden_us) in by_resource.items()
        },
    }


def busy_and_hidden_us(spans: Sequence[Span]) -> NDArray[np.float64]:
    """[resources, 2] time in which a resource worked, and in which another worked too."""
    # [spans, 1] each
    start_us, end_us = np.array([(span.start_us, span.end_us) for span in spans]).T[:, :, None]
    # Between two neighbouring ends of spans nothing changes.
    ends_us = np.unique([start_us, end_us])
    # [spans, ends - 1]
    runs = (start_us <= ends_us[:-1]) & (ends_us[1:] <= end_us)
    resources = np.array([span.resource for span in spans])
    works = np.stack([runs[resources == resource].any(axis=0) for resource in RESOURCE_NAMES])
    hidden = works & (works.sum(axis=0) > 1)
    return np.stack([works @ np.diff(ends_us), hidden @ np.diff(ends_us)], axis=1)


@dataclass(frozen=True, kw_only=True)
class TimelineReport:
    """Rows to print, and the two of them to draw.

    Attributes:
        trace: the recorded trace.
        ours: name of the row drawn below stock alltoall's, if the trace has that one.
        picture: path of the PNG that was written; None without matplotlib.
    """

    trace: Trace
    ours: str
    picture: Path | None = None

    @property
    def drawn_us(self) -> dict[str, float]:
        """Names of the rows in the picture, from above -> their times."""
        names = [name for name in (STOCK, self.ours) if name in self.trace.rows]
        return {name: total_us(self.trace.rows[name]) for name in names}

    @property
    def headline(self) -> str:
        """Times of the rows in the picture, of which each ran once."""
        times = ", ".join(f"{name} {time_text(us)}" for name, us in self.drawn_us.items())
        return f"recorded once: {times}"

    def document(self) -> dict[str, Any]:
        """Overlaps and files, for JSON."""
        return {
            "title": self.trace.title,
            "drawn": list(self.drawn_us),
            "rows": [{"name": name, **overlap_of(row)} for name, row in self.trace.rows.items()],
            "picture": None if self.picture is None else str(self.picture),
        }

    def text(self) -> str:
        """The times of the drawn rows, and a table of all rows."""
        columns = [column for name in RESOURCE_NAMES.values() for column in (f">{name}", ">hidden")]
        cells = []
        for name, row in self.trace.rows.items():
            overlap = overlap_of(row)
            cells.append([name, f"{overlap['total_us'] / 1e3:,.2f}"])
            for resource, share in overlap["hidden_share"].items():
                cells[-1].append(f"{overlap['busy_us'][resource] / 1e3:,.2f}")
                cells[-1].append("-" if share is None else f"{share:.0%}")
        title = "ms that each resource was busy, and how much of that others hid"
        lines = [
            *textwrap.wrap(self.headline, WIDTH),
            *textwrap.wrap(self.trace.title, WIDTH),
            "",
            table(("", ">total", *columns), cells, title=title),
            *([] if self.picture is None else ["", f"drew {self.picture}"]),
        ]
        return "\n".join(lines)


def load_timeline(path: Path, chain: str | None = None) -> TimelineReport:
    """Load a trace of `monta bench --trace`, and choose the row to draw.

    Args:
        path: path of the trace.
        chain: chain whose fastest row is drawn; None for the fastest row of any chain.

    Raises:
        UserError: the file is missing or wrong, or has no such row.
    """
    trace = Trace.load(path)
    ours = {name: row for name, row in trace.rows.items() if not name.startswith("stock ")}
    if not ours:
        raise UserError(f"{path}: has no row of a chain, must be recorded with --chains")
    # A name is "hierarchical_alltoall in 4 chunks".
    names = [name for name in ours if chain is None or chain in name.split()]
    require(bool(names), "--chain", chain, f"have a row in {path}: {', '.join(ours)}")
    fastest = min(names, key=lambda name: total_us(ours[name]))
    return TimelineReport(trace=trace, ours=fastest)
