"""The lines of watched iterations: read strictly, and summed up as medians of the newest."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from monta_megatron.chains import check_chain
from monta_megatron.chains.program import Resource
from monta_megatron.common import strict_yaml
from monta_megatron.common.files import read_json_lines
from monta_megatron.common.rules import NonNegativeFloat
from monta_megatron.common.units import counted
from monta_megatron.planner.online.drift import Change, WatchedIteration
from monta_megatron.tools.launch.training_log import not_repeated
from monta_megatron.tools.run_doctor.figures import ExchangeFigures, LinkChange

# A thousand iterations with one in 50 watched: long enough for a median, short enough to be now.
MOST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class WatchedLine(WatchedIteration):
    """A line of the file: an iteration, from 1, and what was noticed in it.

    The first files had neither `link_ms` nor `predicted_busy_ms`.
    """

    link_ms: Mapping[Resource, NonNegativeFloat] = field(default_factory=dict)
    predicted_busy_ms: Mapping[str, NonNegativeFloat] = field(default_factory=dict)
    change: Change | None = None


def read_watched(path: Path) -> list[WatchedLine]:
    """What counts in a file of --moe-monta-watch-out: its newest lines, and all with a change.

    Raises:
        ValueError: one line that names the file, the line, the key, the value and the rule.
    """
    lines = not_repeated(
        (_iteration(line, f"{path}: line {number}"), (number, line))
        for number, line in enumerate(read_json_lines(path), 1)
    )
    # Strict reading takes seven times as long as parsing.
    return [
        _read(line, f"{path}: line {number}")
        for left, (_, (number, line)) in zip(range(len(lines), 0, -1), lines, strict=True)
        if left <= MOST_LINES or line.get("change") is not None
    ]


def _iteration(line: Any, place: str) -> int:
    match line:
        case {"iteration": int(iteration)}:
            return iteration
    # Which says what is wrong with it.
    return _read(line, place).iteration


def _read(line: Any, place: str) -> WatchedLine:
    match line:
        # A change has the words, too, that its figures make.
        case {"change": {"text": _, **change}}:
            line = {**line, "change": change}
    watched = strict_yaml.build(WatchedLine, line, place)
    check_chain(watched.chain, f"{place}: chain")
    return watched


def summed_up(lines: Sequence[WatchedLine], name: str) -> ExchangeFigures:
    """Medians of the newest lines: those of the last chain, since the last change of a link.

    Args:
        lines: of a file, at least one.
        name: of the file.
    """
    last = lines[-1]
    since = max((number for number, line in enumerate(lines) if line.change is not None), default=0)
    newest = [
        line
        for line in lines[since:]
        if (line.chain, line.num_chunks) == (last.chain, last.num_chunks)
    ][-MOST_LINES:]
    waited_for = Counter(rank for line in newest for rank in line.slowest_ranks)
    return ExchangeFigures(
        kind="measured",
        basis=f"{name}, {_iterations(newest)}",
        chain=last.chain,
        num_chunks=last.num_chunks,
        exchange_ms=median(sum(line.exchange_ms.values()) for line in newest),
        predicted_ms=median(line.predicted_ms for line in newest),
        busy_ms=_medians(line.predicted_busy_ms for line in newest),
        link_ms=_medians(line.link_ms for line in newest),
        link_over_predicted=_medians(line.link_over_predicted for line in newest),
        calibrated_links=last.calibrated_links,
        avg_overload_factor=median(line.avg_overload_factor for line in newest),
        max_overload_factor=max(line.max_overload_factor for line in newest),
        imbalance=median(line.imbalance for line in newest),
        slowest_ranks={rank: times / len(newest) for rank, times in waited_for.most_common()},
    )


def changes_in_force(lines: Sequence[WatchedLine], name: str) -> list[LinkChange]:
    """The last change of each link, where it is slower than at first."""
    last = {
        line.change.resource: LinkChange(
            change=line.change, basis=f"{name}, iteration {line.iteration}"
        )
        for line in lines
        if line.change is not None
    }
    return [noticed for noticed in last.values() if noticed.change.rate_ratio < 1]


def _iterations(lines: Sequence[WatchedLine]) -> str:
    first, last = lines[0].iteration, lines[-1].iteration
    return f"{counted(len(lines), 'watched iteration')}, {first} to {last}"


def _medians(of_lines: Iterable[Mapping[Any, float]]) -> dict[str, float]:
    """Those of what every line has."""
    lines = list(of_lines)
    return {
        name: median(line[name] for line in lines)
        for name in lines[0]
        if all(name in line for line in lines)
    }
