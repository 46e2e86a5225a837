"""Time stock dispatchers and our chains, side by side.

Check our chains against Megatron's dispatchers, then time all of them in one run: one process per
rank, under torchrun, srun or monta emulate.

examples, on 4 CPU ranks that stand for 2 nodes:
  MONTA_CPU_RANKS=1 torchrun --nproc-per-node 4 -m monta_megatron bench \\
      --experts 16 --top-k 4 --hidden 256 --tokens 512 --ranks-per-node 2
  monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 500 -- \\
      monta bench --experts 64 --top-k 8 --hidden 1024 --tokens 512 --json
many points and their tables: benchmarks/sweep.py in the repository
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from monta_megatron.cli.parser import only_the_report
from monta_megatron.common.first_rank import is_first_rank
from monta_megatron.common.tables import Progress, print_report
from monta_megatron.tools.bench.settings import FLAGS, Settings, parse_settings

if TYPE_CHECKING:
    from monta_megatron.planner.cluster import Cluster
    from monta_megatron.tools.bench.report import Report

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of a benchmark; those of `FLAGS` stay texts."""
    for name, flag in FLAGS.items():
        default = "" if flag.default is None else f" (default: {flag.default})"
        parser.add_argument(f"--{name}", help=flag.help + default)
    parser.add_argument("--layer", action="store_true", help="time the layer with its experts too")
    parser.add_argument(
        "--overlap-experts",
        action="store_true",
        help="with --layer: time it with the experts inside the pipeline too",
    )


def check(parsed: argparse.Namespace, world_size: int) -> None:
    """Refuse bad flags before any rank starts.

    Raises:
        ValueError: a flag, or a file that it names, is wrong.
    """
    from monta_megatron.planner.cluster_file import load_cluster

    parse_settings(vars(parsed), world_size)
    if parsed.cluster is not None:
        load_cluster(parsed.cluster)


def run(parsed: argparse.Namespace) -> int:
    """Run on this rank; the first rank prints. Exit status 1 if results differ from stock's."""
    from monta_megatron.common.ranks import find_this_rank, run_as_rank

    def measure() -> int:
        settings = parse_settings(vars(parsed), find_this_rank("bench").world_size)
        if settings.trace is not None and is_first_rank():
            Path(settings.trace).parent.mkdir(parents=True, exist_ok=True)

        def report_point(cluster: "Cluster | None", progress: Progress) -> "Report":
            from monta_megatron.tools.bench.point import measure_point

            return measure_point(settings, cluster, progress)

        report = measured(settings, report_point)
        if report is not None and is_first_rank():
            print_report(report, parsed.json)
        return int(report is None)

    return run_as_rank(measure)


def measured(settings: Settings, measure: "Callable[[Cluster | None, Progress], T]") -> "T | None":
    """Join the launch on this rank, and measure.

    Args:
        settings: of the launch.
        measure: called on every rank with the cluster of --cluster and this rank's progress.

    Returns:
        The result; None if results differ from stock's, which the first rank prints.
    """
    from monta_megatron.common.ranks import find_this_rank
    from monta_megatron.exchange.collectives import join_launch
    from monta_megatron.planner.cluster_file import load_cluster

    this_rank = find_this_rank("bench")
    is_first = this_rank.rank == 0
    cluster = None if settings.cluster is None else load_cluster(settings.cluster)
    with only_the_report():
        from monta_megatron.tools.bench.point import MismatchError

        join_launch(this_rank.local_rank)
        try:
            return measure(cluster, Progress("bench" if is_first else None))
        except MismatchError as error:
            if is_first:
                print(f"monta bench: results differ, nothing was timed\n{error}", file=sys.stderr)
            return None
