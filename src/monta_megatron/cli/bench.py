"""`monta bench`: stock dispatchers and our chains in one run, checked first, timed side by side."""

import argparse
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monta_megatron.cli.parser import add_json, only_the_report, print_json
from monta_megatron.tools.bench.flags import FLAGS, Flag

if TYPE_CHECKING:
    from monta_megatron.emulation.cluster import EmulatedCluster
    from monta_megatron.tools.bench.settings import Settings
    from monta_megatron.tools.bench.sweep import Study, SweepPoint

EXAMPLE = """\
examples, on 4 CPU ranks that stand for 2 nodes:
  MONTA_CPU_RANKS=1 torchrun --nproc-per-node 4 -m monta_megatron.cli bench \\
      --experts 16 --top-k 4 --hidden 256 --tokens 512 --ranks-per-node 2
  monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 500 -- \\
      -m monta_megatron.cli bench --experts 64 --top-k 8 \\
      --hidden 1024 --tokens 512 --json
many points, then their tables:
  monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 500 -- \\
      -m monta_megatron.cli bench \\
      --sweep docs/benchmarks/sweep_2x4.yaml --out sweep.jsonl
  monta bench --report sweep.jsonl --plot plots
"""

THROUGH_HOST = (
    "messages go through the host by Gloo: this checks bits, packing and autograd, proves no order "
    "of streams, and its times say nothing of NCCL"
)

# Flags that are no settings.
FILES = (
    ("sweep", "FILE", "many points in one launch: YAML, see docs/benchmarks/README.md"),
    ("out", "FILE", "add each finished point as a line of JSON; what is there is not run again"),
    ("report", "FILE", "run nothing: tables in Markdown from what --out has written"),
    ("plot", "DIR", "draw the results there; needs matplotlib"),
)


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "bench",
        help="time stock dispatchers and our chains, side by side",
        description="Check our chains against Megatron's dispatchers, then time all of them in one "
        "run: one process per rank, under torchrun, srun or monta emulate.",
        epilog=EXAMPLE,
    )
    _add_arguments(parser)
    parser.set_defaults(run=run, check=check)


def add_flags(parser: Any, flags: Mapping[str, Flag]) -> None:
    """Add flags to a parser, or to a group of one; their values stay texts."""
    for name, flag in flags.items():
        default = "" if flag.default is None else f" (default: {flag.default})"
        parser.add_argument(f"--{name}", metavar=flag.metavar, help=flag.help + default)


def study_parser(study: "Study", description: str | None) -> argparse.ArgumentParser:
    """The parser of a script in `benchmarks/`, which takes the flags of this sub-command."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_arguments(parser)
    parser.set_defaults(command="bench", run=functools.partial(run, study=study))
    return parser


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, FLAGS)
    for name, metavar, text in FILES:
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    parser.add_argument("--layer", action="store_true", help="time the layer with its experts too")
    parser.add_argument(
        "--overlap-experts",
        action="store_true",
        help="with --layer: time it with the experts inside the pipeline too",
    )
    add_json(parser)


def check(parsed: argparse.Namespace, world_size: int) -> None:
    """Refuse bad flags before any rank starts.

    Raises:
        ValueError: a flag, or a file that it names, is wrong.
    """
    from monta_megatron.planner.cluster_file import load_cluster

    if parsed.report is None:
        _points(parsed, world_size)
        if parsed.cluster is not None:
            load_cluster(parsed.cluster)


def run(parsed: argparse.Namespace, study: "Study | None" = None) -> int:
    """Run on this rank; the first rank prints. Exit status 1 if results differ from stock's."""
    from monta_megatron.common.ranks import run_as_rank

    if parsed.report is not None:
        return _report(parsed, study)
    return run_as_rank(lambda: _run(parsed, study))


def _run(parsed: argparse.Namespace, study: "Study | None") -> int:
    from monta_megatron.common.ranks import find_this_rank
    from monta_megatron.planner.cluster_file import load_cluster, with_inter_rate
    from monta_megatron.tools.bench.sweep import Results
    from monta_megatron.tools.pictures import check_can_plot

    # Step 1: what the flags say.
    cluster = None if parsed.cluster is None else load_cluster(parsed.cluster)
    this_rank = find_this_rank("bench")
    points = _points(parsed, this_rank.world_size)
    ratio = points[0].settings.inter_rate_ratio
    if cluster is not None and ratio != 1:
        cluster = with_inter_rate(cluster, ratio)
    if points[0].settings.transport == "gloo":
        from monta_megatron.emulation.gloo_collectives import install_for_device

        install_for_device()
        if this_rank.rank == 0:
            print(f"monta bench: {THROUGH_HOST}", file=sys.stderr)
    # Only the first rank reads and writes results.
    results = None
    if this_rank.rank == 0:
        check_can_plot(parsed.plot)
        results = None if parsed.out is None else Results.open(Path(parsed.out))

    # Step 2: measure.
    reports = []
    with only_the_report():
        from monta_megatron.common.tables import show_progress
        from monta_megatron.tools.bench.run import MismatchError, run_benchmarks

        def is_kept(settings: "Settings", emulated: "EmulatedCluster | None") -> bool:
            return results is not None and results.holds(settings, emulated, study)

        try:
            with show_progress("bench", this_rank.rank == 0) as progress:
                for report in run_benchmarks(points, this_rank, cluster, progress, is_kept, study):
                    reports.append(report)
                    if results is not None:
                        results.add(report)
        except MismatchError as error:
            if this_rank.rank == 0:
                print(f"monta bench: results differ, nothing was timed\n{error}", file=sys.stderr)
            return 1

    # Step 3: report.
    if this_rank.rank == 0:
        if parsed.sweep is None and reports:
            _print_report(reports[0], parsed.json, study)
        else:
            reports = results.reports if results else reports
            _print_summary(reports, parsed.json, study)
        _plot(reports, parsed.plot)
    return 0


def _points(parsed: argparse.Namespace, world_size: int) -> "list[SweepPoint]":
    from monta_megatron.tools.bench.settings import parse_settings
    from monta_megatron.tools.bench.sweep import SweepPoint, read_sweep
    from monta_megatron.tools.bench.traffic import check_routing

    if parsed.sweep is None:
        points = [SweepPoint(name="headline", settings=parse_settings(vars(parsed), world_size))]
    elif parsed.out is None:
        raise ValueError("--out: not given, must be a file beside --sweep")
    else:
        points = read_sweep(parsed.sweep, vars(parsed), world_size)
    for point in points:
        check_routing(point.settings)
    return points


def _report(parsed: argparse.Namespace, study: "Study | None") -> int:
    from monta_megatron.tools.bench.sweep import read_reports
    from monta_megatron.tools.pictures import check_can_plot

    reports = read_reports(Path(parsed.report))
    if not reports:
        raise ValueError(f"--report: got {parsed.report}, must hold at least one line")
    check_can_plot(parsed.plot)
    _print_summary(reports, parsed.json, study)
    _plot(reports, parsed.plot)
    return 0


def _plot(reports: list[dict[str, Any]], folder: str | None) -> None:
    if folder is None or not reports:
        return
    from monta_megatron.tools.bench.plots import plot_report, plot_sweep

    for path in [*plot_report(reports[0], Path(folder)), *plot_sweep(reports, Path(folder))]:
        print(f"monta bench: drew {path}", file=sys.stderr)


def _print_summary(
    reports: list[dict[str, Any]], as_json: bool, study: "Study | None" = None
) -> None:
    from monta_megatron.tools.bench.summary import summarise, summary_lines

    if as_json:
        summary = {} if study is not None else {"summary": summarise(reports)}
        print_json({**summary, "reports": reports})
    elif study is not None:
        print(study.text(reports))
    else:
        print("\n".join(summary_lines(reports)))


def _print_report(report: dict[str, Any], as_json: bool, study: "Study | None" = None) -> None:
    from monta_megatron.tools.bench.report import Row, prediction_table, table

    rows = [Row(**row) for row in report["rows"]]
    left_out = (f"left out: {name}: {why}" for name, why in report["meta"]["skipped"].items())
    routing = f"routing: {report['meta']['layer']['routing']}"
    blocks = [table(rows), routing, "\n".join(left_out), prediction_table(rows)]
    if study is not None:
        blocks.append(study.text([report]))
    text = "\n\n".join(filter(None, blocks))
    print(text, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print_json(report)
