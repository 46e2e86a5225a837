"""Measure a cluster file for plan and bench.

Measure collectives, copies and pairs of them, and write the cluster file by which the planner
chooses: one process per rank, under torchrun, srun or monta emulate.

examples:
  torchrun --nnodes 2 --nproc-per-node 8 ... \\
      -m monta_megatron calibrate --nics-per-node 8 --out cluster.yaml
  monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 500 -- \\
      monta calibrate --out cluster.yaml
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from monta_megatron.cli.parser import only_the_report
from monta_megatron.common.flags import positive, whole
from monta_megatron.common.tables import Progress, print_report, tell


def add_arguments(parser: Any) -> None:
    """Add all flags."""
    parser.add_argument("--out", type=Path, required=True, help="the cluster file to write")
    parser.add_argument(
        "--budget-seconds", type=positive, default=60.0, help="for all but the smallest sizes"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=whole(1),
        help="ranks joined by the node link, if not the launcher's",
    )
    parser.add_argument(
        "--nics-per-node", type=whole(1), help="interfaces that they share; needed on several nodes"
    )


def run(parsed: argparse.Namespace) -> int:
    """Measure on this rank; the first one writes and prints."""
    from monta_megatron.common.ranks import run_as_rank

    begin_s = time.perf_counter()
    return run_as_rank(lambda: _run(parsed, begin_s))


def _run(parsed: argparse.Namespace, begin_s: float) -> int:
    from monta_megatron.common.files import write_whole
    from monta_megatron.common.ranks import find_this_rank
    from monta_megatron.emulation.cluster import EmulatedCluster
    from monta_megatron.planner.cluster_file import dump_cluster

    # Step 1: the flags.
    this_rank = find_this_rank("calibrate --out FILE")
    # Only the first rank writes; others may not see that folder.
    if this_rank.rank == 0 and (parsed.out.is_dir() or not os.access(parsed.out.parent, os.W_OK)):
        raise ValueError(f"--out: got {parsed.out}, must be a file in a folder that can be written")
    emulated = EmulatedCluster.from_environment()
    nics_per_node, hardware = parsed.nics_per_node, None
    if emulated is not None:
        nics_per_node = nics_per_node or 1
        hardware = f"emulated at {emulated.inter_mbit:g} Mbit/s"

    # Step 2: measure.
    with only_the_report():
        from monta_megatron.calibration.command import calibrate
        from monta_megatron.exchange.collectives import join_launch

        report = calibrate(
            join_launch(this_rank.local_rank),
            budget_s=parsed.budget_seconds,
            ranks_per_node=parsed.ranks_per_node,
            nics_per_node=nics_per_node,
            hardware=hardware,
            progress=Progress("calibrate" if this_rank.rank == 0 else None),
            begin_s=begin_s,
        )
    if this_rank.rank != 0:
        return 0

    # Step 3: write and report.
    write_whole(parsed.out, dump_cluster(report.cluster))
    if parsed.json:
        print(report.text(), file=sys.stderr)
    print_report(report, parsed.json)
    tell("calibrate", f"wrote {parsed.out}")
    return 0
