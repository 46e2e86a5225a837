"""What a benchmark of the repository's `benchmarks/` does beyond `monta bench`. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monta_megatron.tools.bench.report import Row

if TYPE_CHECKING:
    from monta_megatron.tools.bench.candidates import Build
    from monta_megatron.tools.bench.point import Bench


@dataclass(frozen=True, kw_only=True)
class Study:
    """Other candidates, or more that is said of them.

    Attributes:
        name: what the settings in its reports are marked with.
        build: makes the candidates, in place of `candidates.build_candidates`.
        finish: the fields of a report that it adds or replaces, from the rows of a point.
        text: its tables, from reports.
    """

    name: str
    build: "Build"
    finish: "Callable[[Bench, list[Row]], dict[str, Any]]"
    text: Callable[[Sequence[dict[str, Any]]], str]
