r"""Many points of `monta bench` in one launch, each saved when done; their tables and pictures.

Takes the flags of `monta bench`, and like it one process per rank. A start that was killed goes on:
what the file of `--out` holds is not run again. `--report` needs no ranks:

    monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 500 -- \
        benchmarks/sweep.py --sweep docs/benchmarks/sweep_2x4.yaml --out sweep.jsonl
    python benchmarks/sweep.py --report sweep.jsonl --plot plots
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from summary import plot_sweep, summarise, summary_lines

from monta_megatron.cli import bench, main
from monta_megatron.cli.parser import Parser
from monta_megatron.common import strict_yaml
from monta_megatron.common.files import read_text, write_whole
from monta_megatron.common.flags import positive
from monta_megatron.common.ranks import find_this_rank, run_as_rank
from monta_megatron.common.tables import Progress, print_json
from monta_megatron.common.text import advice
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import with_inter_rate
from monta_megatron.tools import pictures
from monta_megatron.tools.bench.report import Report, Row
from monta_megatron.tools.bench.settings import FLAGS, Settings, parse_settings

if TYPE_CHECKING:
    from monta_megatron.tools.bench.candidates import Bench

# The others are of the whole launch.
POINT_FLAGS = FLAGS.keys() - {"ranks-per-node", "cluster"}
FILES = (
    ("sweep", "FILE", "many points in one launch: YAML, see docs/results.md"),
    ("out", "FILE", "add each finished point as a line of JSON; what is there is not run again"),
    ("report", "FILE", "run nothing: tables in Markdown from what --out has written"),
    ("plot", "DIR", "draw the results of a sweep there; needs matplotlib"),
)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Other candidates than those of `monta bench`, and what is said of them.

    Attributes:
        name: marks its reports.
        build: adds the candidates, in place of `candidates.with_candidates`.
        finish: adds to the report of a point.
        text: its tables, from reports.
    """

    name: str
    build: "Callable[[Bench], Bench]"
    finish: Callable[[dict[str, Any]], None]
    text: Callable[[Sequence[dict[str, Any]]], str]


class Point(NamedTuple):
    """One benchmark of a launch.

    Attributes:
        name: for the progress display, such as "tokens 2048, hidden 512".
        settings: all its settings.
    """

    name: str
    settings: Settings


def build_parser(study: Study | None = None, description: str | None = None) -> Parser:
    """The parser of a script with these flags."""
    parser = Parser(description=description or __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    bench.add_arguments(parser)
    for name, metavar, text in FILES:
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    parser.add_argument(
        "--inter-rate-ratio",
        metavar="X",
        type=positive,
        default=1.0,
        help="rate of this network over that of --cluster, whose costs are scaled by it",
    )
    parser.set_defaults(command="bench", run=lambda parsed: _run(parsed, study))
    return parser


def start(study: Study | None = None, description: str | None = None) -> int:
    """Run a script with these flags; returns its exit status."""
    return main(parser=build_parser(study, description))


def _run(parsed: argparse.Namespace, study: Study | None) -> int:
    if parsed.report is None:
        return run_as_rank(lambda: _measure(parsed, study))
    reports = read_reports(Path(parsed.report))
    if not reports:
        raise ValueError(f"--report: got {parsed.report}, must hold at least one line")
    check_can_plot(parsed.plot)
    _print(reports, parsed, study)
    return 0


def check_can_plot(folder: str | None) -> None:
    """Fail before the work, not after it, if its pictures cannot be drawn; make their folder."""
    if folder is not None:
        if not pictures.can_draw():
            raise ValueError(f"--plot: needs matplotlib: {pictures.INSTALL}")
        Path(folder).mkdir(parents=True, exist_ok=True)


def _measure(parsed: argparse.Namespace, study: Study | None) -> int:
    this_rank = find_this_rank("bench")
    points = _points(parsed, this_rank.world_size)
    # Only the first rank reads and writes results.
    results = None
    if this_rank.rank == 0:
        check_can_plot(parsed.plot)
        results = None if parsed.out is None else Results.open(Path(parsed.out))

    def measure(cluster: Cluster | None, progress: Progress) -> list[dict[str, Any]]:
        from monta_megatron.exchange.collectives import gather_objects
        from monta_megatron.tools.bench.point import measure_point

        if cluster is not None:
            cluster = with_inter_rate(cluster, parsed.inter_rate_ratio)
        emulated, ratio = EmulatedCluster.from_environment(), parsed.inter_rate_ratio
        left_here = [
            point
            for point in points
            if results is None or not results.holds(point.settings, emulated, ratio, study)
        ]
        # The first rank's, which alone has read the results.
        left = gather_objects(left_here)[0]
        if len(left) < len(points):
            progress.phase(f"{len(points) - len(left)} of {len(points)} points kept from before", 0)
        reports = []
        for number, point in enumerate(left, 1):
            if len(points) > 1:
                progress.phase(f"point {number} of {len(left)}: {point.name}", 0)
            candidates = {} if study is None else {"build": study.build}
            report = measure_point(point.settings, cluster, progress, **candidates).document()
            report["meta"] |= {"command": shlex.join(sys.argv), "inter_rate_ratio": ratio}
            if study is not None:
                report["study"] = study.name
                study.finish(report)
            reports.append(report)
            if results is not None:
                results.add(report)
        return reports

    reports = bench.measured(points[0].settings, measure)
    if reports is not None and this_rank.rank == 0:
        _print(results.reports if results else reports, parsed, study)
    return int(reports is None)


def _points(parsed: argparse.Namespace, world_size: int) -> list[Point]:
    if parsed.sweep is None:
        return [Point("headline", parse_settings(vars(parsed), world_size))]
    if parsed.out is None:
        raise ValueError("--out: not given, must be a file beside --sweep")
    return read_sweep(parsed.sweep, vars(parsed), world_size)


def _print(reports: list[dict[str, Any]], parsed: argparse.Namespace, study: Study | None) -> None:
    is_one = parsed.sweep is None and parsed.report is None
    if parsed.json:
        summary = {} if study is not None else {"summary": summarise(reports)}
        print_json(reports[-1] if is_one else {**summary, "reports": reports})
    elif study is not None:
        print(study.text(reports[-1:] if is_one else reports))
    elif is_one:
        rows = [Row(**row) for row in reports[-1]["rows"]]
        print(Report(meta=reports[-1]["meta"], rows=rows).text())
    else:
        print("\n".join(summary_lines(reports)))
    if parsed.plot is not None:
        for path in plot_sweep(reports, Path(parsed.plot)):
            print(f"monta bench: drew {path}", file=sys.stderr)


def read_sweep(path: str, flags: Mapping[str, Any], world_size: int) -> list[Point]:
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
        points.append(Point(name or "headline", settings))
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
            ValueError: the file holds something else.
        """
        results = cls(path=path, reports=read_reports(path))
        # Drop a line that a kill has cut short.
        write_whole(path, "".join(json.dumps(each) + "\n" for each in results.reports))
        return results

    def holds(
        self,
        settings: Settings,
        emulated: EmulatedCluster | None,
        inter_rate_ratio: float = 1.0,
        study: Study | None = None,
    ) -> bool:
        """Whether a point has been measured: with the same settings, on the same cluster."""
        plain = strict_yaml.plain(settings)
        cluster = None if emulated is None else asdict(emulated)
        return any(
            report["meta"]["settings"] == plain
            and report["meta"]["inter_rate_ratio"] == inter_rate_ratio
            and report.get("study") == (study and study.name)
            and report["meta"]["emulated_cluster"] == cluster
            for report in self.reports
        )

    def add(self, report: dict[str, Any]) -> None:
        """Keep one more report."""
        self.reports.append(report)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")


def read_reports(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that `Results` has written, without a last one that was cut short.

    Raises:
        ValueError: the file holds something else.
    """
    lines = read_text(path, "reports").splitlines(keepends=True) if path.exists() else []
    reports = []
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            continue
        try:
            report = json.loads(line)
            reports.append({**report, "meta": report["meta"], "rows": report["rows"]})
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}: line {number} is no report of monta bench") from None
    return reports


if __name__ == "__main__":
    sys.exit(start())
