r"""Many points of `monta bench` in one launch, each saved when done; their tables and a picture.

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

from summary import measured_points, plot_predicted, summary_text

from monta_megatron.cli import main
from monta_megatron.cli.on_ranks import (
    add_bench_arguments,
    joined_launch,
    world_size_of_launch,
)
from monta_megatron.cli.parser import Parser
from monta_megatron.common import strict_yaml
from monta_megatron.common.errors import UserError
from monta_megatron.common.files import read_text, write_whole
from monta_megatron.common.ranks import is_first_rank
from monta_megatron.common.rules import positive
from monta_megatron.common.text import advice
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.tools import pictures
from monta_megatron.tools.bench.settings import FLAGS, Settings, parse_settings

if TYPE_CHECKING:
    from monta_megatron.tools.bench.candidates import Bench

# The others are of the whole launch.
POINT_FLAGS = FLAGS.keys() - {"ranks-per-node", "cluster"}
FILES = (
    ("sweep", "FILE", "the points: YAML, see docs/measuring.md"),
    ("out", "FILE", "add each finished point as a line of JSON; what is there is not run again"),
    ("report", "FILE", "run nothing: tables in Markdown from what --out has written"),
    ("plot", "DIR", "draw predicted against measured times there; needs matplotlib"),
)


@dataclass(frozen=True, kw_only=True)
class Study:
    """The candidates of a script, and their tables.

    Attributes:
        name: marks the reports; None for those of `monta bench`.
        description: of the script.
        build: adds the candidates; None for those of `monta bench`.
        text: tables of reports.
    """

    name: str | None
    description: str
    build: "Callable[[Bench], Bench] | None"
    text: Callable[[Sequence[Mapping[str, Any]]], str]


SWEEP = Study(name=None, description=__doc__, build=None, text=summary_text)


class Point(NamedTuple):
    """One benchmark of a launch.

    Attributes:
        name: for the progress display, such as "tokens 2048, hidden 512".
        settings: all its settings.
    """

    name: str
    settings: Settings


def build_parser(study: Study = SWEEP) -> Parser:
    """The parser of a script with these flags."""
    parser = Parser(description=study.description)
    add_bench_arguments(parser)
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


def start(study: Study = SWEEP) -> int:
    """Run a script with these flags; returns its exit status."""
    return main(parser=build_parser(study))


def _run(parsed: argparse.Namespace, study: Study) -> int:
    if parsed.report is None:
        return _measure(parsed, study)
    check_can_plot(parsed.plot)
    _report(Path(parsed.report), parsed.plot, study)
    return 0


def check_can_plot(folder: str | None) -> None:
    """Fail before the work, not after it, if its pictures cannot be drawn; make their folder."""
    if folder is not None:
        if not pictures.can_draw():
            raise UserError(f"--plot: needs matplotlib: {pictures.INSTALL}")
        Path(folder).mkdir(parents=True, exist_ok=True)


def _measure(parsed: argparse.Namespace, study: Study) -> int:
    world_size = world_size_of_launch("bench")
    for name in ("sweep", "out"):
        if getattr(parsed, name) is None:
            raise UserError(f"--{name}: not given, must be a file, or else --report")
    points = read_sweep(parsed.sweep, vars(parsed), world_size)
    # Only the first rank reads and writes results.
    out, kept = Path(parsed.out), []
    if is_first_rank():
        check_can_plot(parsed.plot)
        kept = read_reports(out)
        # Without a last line that a kill has cut short.
        write_whole(out, "".join(json.dumps(report) + "\n" for report in kept))

    cluster, ratio = None, parsed.inter_rate_ratio
    if parsed.cluster is not None:
        cluster = load_cluster(parsed.cluster).at_rate("inter", ratio)
    with joined_launch("bench") as (_, progress):
        from monta_megatron.exchange.agreement import gather_objects
        from monta_megatron.tools.bench.candidates import with_candidates
        from monta_megatron.tools.bench.measure import measure_point

        # The first rank's, which alone has read the results.
        left = gather_objects(
            [point for point in points if not is_measured(kept, point.settings, ratio, study)]
        )[0]
        if len(left) < len(points):
            progress.phase(f"{len(points) - len(left)} of {len(points)} points kept from before", 0)
        for number, point in enumerate(left, 1):
            progress.phase(f"point {number} of {len(left)}: {point.name}", 0)
            build = study.build or with_candidates
            report = measure_point(point.settings, cluster, progress, build).document()
            report["meta"] |= {"command": shlex.join(sys.argv), "inter_rate_ratio": ratio}
            if study.name is not None:
                report["study"] = study.name
            if is_first_rank():
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(report) + "\n")
    if is_first_rank():
        _report(out, parsed.plot, study)
    return 0


def _report(path: Path, plot: str | None, study: Study) -> None:
    """Print the tables of a file of results, and draw the picture."""
    reports = read_reports(path)
    if not reports:
        raise UserError(f"--report: got {path}, must hold at least one line")
    print(study.text(reports))
    points = [point for point in measured_points(reports) if point.errors]
    if plot is not None and points:
        plot_predicted(points, Path(plot, "predicted.png"))


def read_sweep(path: str, flags: Mapping[str, Any], world_size: int) -> list[Point]:
    """The points of a sweep file.

    Args:
        path: path of the file.
        flags: flags of the command line, by name, as text; None where not given.
        world_size: ranks of the launch.

    Raises:
        UserError: the file is wrong; names the file, the point, the flag, the value and the rule.
    """
    data = strict_yaml.read(path)
    if not isinstance(data, dict) or set(data) != {"headline", "points"}:
        raise UserError(f"{path}: must be a mapping with the keys headline, points")
    if not isinstance(data["points"], list) or not data["points"]:
        raise UserError(f"{path}: points: must be a list of at least one mapping of flags")
    headline = _flags(data["headline"], f"{path}: headline")
    given = {name: value for name, value in flags.items() if value not in (None, False)}
    points = []
    for position, entry in enumerate(data["points"]):
        where = f"{path}: points[{position}]"
        changed = _flags(entry, where)
        try:
            settings = parse_settings({**headline, **given, **changed}, world_size)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        name = ", ".join(f"{flag.replace('_', '-')} {text}" for flag, text in changed.items())
        points.append(Point(name or "headline", settings))
    return points


def _flags(data: Any, where: str) -> dict[str, str]:
    """Flags as `parse_settings` takes them: underscores in the names, texts as values."""
    if not isinstance(data, dict):
        raise UserError(f"{where}: got {data!r}, must be a mapping of flags of monta bench")
    flags = {}
    for name, value in data.items():
        if name not in POINT_FLAGS:
            raise UserError(f"{where}: {name}: unknown flag; {advice(name, POINT_FLAGS)}")
        values = value if isinstance(value, list) else [value]
        flags[name.replace("-", "_")] = ",".join(map(str, values))
    return flags


def is_measured(
    reports: Sequence[Mapping[str, Any]],
    settings: Settings,
    inter_rate_ratio: float = 1.0,
    study: Study = SWEEP,
) -> bool:
    """Whether reports have a point: of the same settings, on the cluster that this rank runs on."""
    emulated = EmulatedCluster.from_environment()
    wanted = {
        "settings": strict_yaml.plain(settings),
        "emulated_cluster": None if emulated is None else asdict(emulated),
        "inter_rate_ratio": inter_rate_ratio,
    }
    return any(
        report.get("study") == study.name and wanted.items() <= report["meta"].items()
        for report in reports
    )


def read_reports(path: Path) -> list[dict[str, Any]]:
    """The finished points of a file of results, without a last line that was cut short.

    Raises:
        UserError: the file holds something else.
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
            raise UserError(f"{path}: line {number} is no report of monta bench") from None
    return reports


if __name__ == "__main__":
    sys.exit(start())
