"""A sweep: a benchmark at many points in one launch, each saved when done. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monta_megatron.common import strict_yaml
from monta_megatron.common.files import add_json_line, read_json_lines, write_json_lines
from monta_megatron.common.text import advice
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.tools.bench.flags import POINT_FLAGS
from monta_megatron.tools.bench.report import Row
from monta_megatron.tools.bench.settings import Settings, parse_settings

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


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One benchmark of a sweep.

    Attributes:
        name: what it changes, such as "tokens 2048, hidden 512".
        settings: all its settings.
    """

    name: str
    settings: Settings


def read_sweep(path: str, flags: Mapping[str, Any], world_size: int) -> list[SweepPoint]:
    """The points of a sweep file.

    Args:
        path: path of the file.
        flags: flags of the command line, by name, as text; None where not given.
        world_size: ranks of the launch.

    Raises:
        ValueError: the file is wrong; names the file, the point, the flag, the value and the rule.
    """
    data = strict_yaml.read(path)
    if not isinstance(data, dict) or set(data) != {"headline", "points"}:
        raise ValueError(f"{path}: must be a mapping with the keys headline, points")
    if not isinstance(data["points"], list) or not data["points"]:
        raise ValueError(f"{path}: points: must be a list of at least one mapping of flags")
    headline = _flags(data["headline"], f"{path}: headline")
    given = {name: value for name, value in flags.items() if value not in (None, False)}
    points = []
    for position, entry in enumerate(data["points"]):
        where = f"{path}: points[{position}]"
        changed = _flags(entry, where)
        try:
            settings = parse_settings({**headline, **given, **changed}, world_size)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        name = ", ".join(f"{flag.replace('_', '-')} {text}" for flag, text in changed.items())
        points.append(SweepPoint(name=name or "headline", settings=settings))
    return points


def _flags(data: Any, where: str) -> dict[str, str]:
    """Flags as `parse_settings` takes them: underscores in the names, texts as values."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: got {data!r}, must be a mapping of flags of monta bench")
    flags = {}
    for name, value in data.items():
        if name not in POINT_FLAGS:
            raise ValueError(f"{where}: {name}: unknown flag; {advice(name, POINT_FLAGS)}")
        values = value if isinstance(value, list) else [value]
        flags[name.replace("-", "_")] = ",".join(map(str, values))
    return flags


@dataclass(frozen=True, kw_only=True)
class Results:
    """Finished points in a file, one line each: the document of `--json` for a point.

    Attributes:
        path: the file.
        reports: its lines.
    """

    path: Path
    reports: list[dict[str, Any]]

    @classmethod
    def open(cls, path: Path) -> "Results":
        """Continue an existing file, or start a new one.

        Raises:
            ValueError: the file holds something else, or cannot be written.
        """
        results = cls(path=path, reports=read_reports(path))
        # Drop a line that a kill has cut short.
        write_json_lines(path, results.reports)
        return results

    def holds(
        self, settings: Settings, emulated: EmulatedCluster | None, study: Study | None = None
    ) -> bool:
        """Whether a point has been measured: with the same settings, on the same cluster."""
        wanted = (
            settings_document(settings, study),
            _setting_of(None if emulated is None else asdict(emulated)),
        )
        return any(
            (report["settings"], _setting_of(report["meta"]["emulated_cluster"])) == wanted
            for report in self.reports
        )

    def add(self, report: dict[str, Any]) -> None:
        """Keep one more report."""
        self.reports.append(report)
        add_json_line(self.path, report)


def settings_document(settings: Settings, study: Study | None) -> dict[str, Any]:
    """Settings in a report."""
    document: dict[str, Any] = strict_yaml.plain(settings)
    return document if study is None else {**document, "study": study.name}


def read_reports(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that `Results` has written.

    Raises:
        ValueError: the file holds something else, or a text that is not printable.
    """
    reports = read_json_lines(path)
    for number, report in enumerate(reports, 1):
        if not isinstance(report, dict) or not {"settings", "meta", "rows"} <= set(report):
            raise ValueError(f"{path}: line {number} is no report of monta bench")
        strict_yaml.check_texts(report, f"{path}: line {number}")
    return reports


def _setting_of(emulated: dict[str, Any] | None) -> dict[str, Any] | None:
    """An emulated cluster without its measured rates, which differ a little each time."""
    if emulated is None:
        return None
    return {name: value for name, value in emulated.items() if not name.startswith("measured")}
