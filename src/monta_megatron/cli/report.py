"""`monta report`: plan, timelines, benchmark and calibration on one HTML page."""

import argparse
from pathlib import Path
from typing import Any

from monta_megatron.cli import planning
from monta_megatron.cli.parser import add_json
from monta_megatron.common.flags import printable
from monta_megatron.common.tables import print_report

EXAMPLE = """\
examples:
  monta report --out report.html --model qwen3_235b_a22b \\
      --cluster h100_8x_ndr --world-size 128 --tp 2 --ep 16 --pp 4
  monta report --out report.html --cluster cluster.yaml --bench bench.json \\
      --recording recorded
"""

# Flags that name files.
READ = ("model", "cluster", "layout", "routing", "recording", "stock", "bench")
# Flags that say nothing without --model, and what stands for "not given".
OF_MODEL = {
    **dict.fromkeys(
        name.replace("-", "_") for name in (*planning.JOB, *planning.SIZES, *planning.BATCH)
    ),
    **dict.fromkeys(("layout", "tokens", "global_batch_size", "inter_rate_ratio")),
    "routing": "uniform",
    "phase": "forward_backward",
    "ignore_memory": False,
}


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "report",
        help="write plan, timelines, benchmark and calibration as one HTML page",
        description="Write one HTML page that loads nothing from anywhere: the plan and its "
        "timeline (--model, --cluster and a layout, as for monta plan), a recorded timeline, a "
        "benchmark, and how well the cluster's costs are known. Parts that are not given are left "
        "out, and the page says so.",
        epilog=EXAMPLE,
    )
    planning.add_arguments(parser, needs_model=False)
    parser.add_argument(
        "--recording", metavar="PATH", help="of monta timeline --record, or --moe-monta-record"
    )
    parser.add_argument(
        "--stock", metavar="PATH", help="--recording's counterpart with the chain alltoall"
    )
    parser.add_argument("--bench", metavar="FILE", help="what monta bench --json printed")
    parser.add_argument("--title", metavar="TEXT", type=printable, help="of the page")
    parser.add_argument("--out", metavar="FILE", required=True, help="the page")
    parser.add_argument("--force", action="store_true", help="overwrite the file of --out")
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Write the page, and list its sections."""
    _check_flags(parsed)
    from monta_megatron.tools.report.page import PageRequest, write_page

    request = PageRequest(
        out=Path(parsed.out),
        title=parsed.title,
        plan=None if parsed.model is None else planning.read(parsed),
        recording=None if parsed.recording is None else Path(parsed.recording),
        stock=None if parsed.stock is None else Path(parsed.stock),
        bench=None if parsed.bench is None else Path(parsed.bench),
        cluster=parsed.cluster,
    )
    print_report(write_page(request), parsed.json)
    return 0


def _check_flags(parsed: argparse.Namespace) -> None:
    _check_out(Path(parsed.out), parsed)
    given = [parsed.model, parsed.cluster, parsed.recording, parsed.bench]
    if all(value is None for value in given):
        raise ValueError(
            "--model, --cluster, --recording, --bench: none given, must be one at least"
        )
    for name, nothing in OF_MODEL.items():
        value = getattr(parsed, name)
        if parsed.model is None and value != nothing:
            raise ValueError(f"--{name.replace('_', '-')}: got {value}, must come with --model")
    if parsed.model is not None and parsed.cluster is None:
        raise ValueError("--cluster: not given, must be with --model")
    if parsed.stock is not None and parsed.recording is None:
        raise ValueError(f"--stock: got {parsed.stock}, must come with --recording")


def _check_out(out: Path, parsed: argparse.Namespace) -> None:
    if not out.exists():
        return
    if not out.is_file():
        raise ValueError(f"--out: got {out}, must be a file")
    for name in READ:
        value = getattr(parsed, name)
        if value is not None and Path(value).exists() and out.samefile(value):
            raise ValueError(f"--out: got {out}, must be another file than --{name}")
    if not parsed.force:
        raise ValueError(f"--out: got {out}, must not exist; --force overwrites it")
