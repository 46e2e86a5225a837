"""`monta bench`: stock dispatchers and our chains in one run, checked first, timed side by side."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monta_megatron.cli.parser import add_json, only_the_report
from monta_megatron.common.files import make_folder
from monta_megatron.common.tables import Progress, tell
from monta_megatron.tools.bench.flags import FLAGS, Flag

if TYPE_CHECKING:
    from monta_megatron.tools.bench.settings import BenchPoint, Settings

EXAMPLE = """\
examples, on 4 CPU ranks that stand for 2 nodes:
  MONTA_CPU_RANKS=1 torchrun --nproc-per-node 4 -m monta_megatron.cli bench \\
      --experts 16 --top-k 4 --hidden 256 --tokens 512 --ranks-per-node 2
  monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 500 -- \\
      -m monta_megatron.cli bench --experts 64 --top-k 8 \\
      --hidden 1024 --tokens 512 --json
many points and their tables: benchmarks/sweep.py in the repository
"""

THROUGH_HOST = (
    "messages go through the host by Gloo: this checks bits, packing and autograd, proves no order "
    "of streams, and its times say nothing of NCCL"
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
    add_arguments(parser)
    parser.set_defaults(run=run, check=check)


def add_flags(parser: Any, flags: Mapping[str, Flag]) -> None:
    """Add flags to a parser, or to a group of one; their values stay texts."""
    for name, flag in flags.items():
        default = "" if flag.default is None else f" (default: {flag.default})"
        parser.add_argument(f"--{name}", metavar=flag.metavar, help=flag.help + default)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of a benchmark."""
    add_flags(parser, FLAGS)
    parser.add_argument("--plot", metavar="DIR", help="draw the results there; needs matplotlib")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="record a pass of each kind for every row of the exchange, on all ranks: a Chrome "
        "trace, for https://ui.perfetto.dev and monta timeline",
    )
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

    _settings(parsed, world_size)
    if parsed.cluster is not None:
        load_cluster(parsed.cluster)


def run(parsed: argparse.Namespace) -> int:
    """Run on this rank; the first rank prints. Exit status 1 if results differ from stock's."""
    from monta_megatron.common.ranks import run_as_rank

    return run_as_rank(lambda: _run(parsed))


def _run(parsed: argparse.Namespace) -> int:
    from monta_megatron.common.ranks import find_this_rank
    from monta_megatron.tools.bench.report import print_report
    from monta_megatron.tools.bench.settings import BenchPoint
    from monta_megatron.tools.pictures import check_can_plot

    this_rank = find_this_rank("bench")
    points = [BenchPoint("headline", _settings(parsed, this_rank.world_size))]
    if this_rank.rank == 0:
        check_can_plot(parsed.plot)
        if parsed.trace is not None:
            make_folder(parsed.trace.parent, "--trace")
    reports: list[dict[str, Any]] = []
    status = measure(points, reports.append, trace=parsed.trace)
    if this_rank.rank == 0 and status == 0:
        print_report(reports[0], parsed.json)
        if parsed.plot is not None:
            from monta_megatron.tools.bench.report import plot_report

            for path in plot_report(reports[0], Path(parsed.plot)):
                tell("bench", f"drew {path}")
    return status


def measure(
    points: "Sequence[BenchPoint]", keep: Callable[[dict[str, Any]], None], **options: Any
) -> int:
    """Measure points on this rank.

    Args:
        points: with the same flags of the launch.
        keep: called with each report, on every rank.
        options: of `point.run_benchmarks`.

    Returns:
        The exit status: 1 if results differ from stock's, which the first rank prints.
    """
    from monta_megatron.common.ranks import find_this_rank
    from monta_megatron.planner.cluster_file import load_cluster, with_inter_rate

    settings, this_rank = points[0].settings, find_this_rank("bench")
    cluster = None if settings.cluster is None else load_cluster(settings.cluster)
    if cluster is not None and settings.inter_rate_ratio != 1:
        cluster = with_inter_rate(cluster, settings.inter_rate_ratio)
    if settings.transport == "gloo":
        from monta_megatron.emulation.gloo_collectives import install_for_device

        install_for_device()
        if this_rank.rank == 0:
            tell("bench", THROUGH_HOST)
    with only_the_report():
        from monta_megatron.tools.bench.point import MismatchError, run_benchmarks

        try:
            progress = Progress("bench" if this_rank.rank == 0 else None)
            for report in run_benchmarks(points, this_rank, cluster, progress, **options):
                keep(report)
        except MismatchError as error:
            if this_rank.rank == 0:
                print(f"monta bench: results differ, nothing was timed\n{error}", file=sys.stderr)
            return 1
    return 0


def _settings(parsed: argparse.Namespace, world_size: int) -> "Settings":
    from monta_megatron.tools.bench.settings import parse_settings

    return parse_settings(vars(parsed), world_size)
