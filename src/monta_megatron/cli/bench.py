"""`monta bench`: stock dispatchers and our chains in one run, checked first, timed side by side."""

import argparse
import contextlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

# torchrun ends all ranks as soon as one has failed; by then the first rank has to have said why.
OTHER_RANKS_LINGER_S = 5.0

EXAMPLE = """\
examples, on 4 CPU ranks that stand for 2 nodes:
  MONTA_CPU_RANKS=1 torchrun --nproc-per-node 4 -m monta_megatron.cli bench \\
      --experts 16 --top-k 4 --hidden 256 --tokens 512 --ranks-per-node 2
  monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 500 -- \\
      -m monta_megatron.cli bench --experts 64 --top-k 8 --hidden 1024 --tokens 512 --json
"""

# Flags with a value. Values are checked together (benchmark/settings.py), so that a bad one is one
# line from one rank.
FLAGS = (
    ("experts", "N", "experts of the layer"),
    ("top-k", "N", "experts of each token"),
    ("hidden", "N", "hidden size"),
    ("tokens", "N", "tokens of each rank"),
    ("dtype", "NAME", "float32 (default) or bfloat16"),
    ("tp", "N", "tensor parallel size (default: 1)"),
    ("ep", "N", "expert parallel size (default: all ranks over --etp)"),
    ("etp", "N", "expert tensor parallel size (default: --tp)"),
    ("routing", "NAME", "uniform (default), skewed or node-limited"),
    ("chains", "LIST", "chains, auto (the planner's pick), or all that can run (default)"),
    ("num-chunks", "LIST", "chunks of each pipelined chain (default: 1,4)"),
    ("stock", "LIST", "Megatron's dispatchers: alltoall, allgather (default: both)"),
    ("phase", "LIST", "forward, forward_backward (default: both)"),
    ("ffn-hidden", "N", "experts' intermediate size, for --layer (default: --hidden)"),
    ("repeats", "N", "timed runs of each (default: 10)"),
    ("warmup", "N", "runs of each before that (default: 2)"),
    ("seed", "N", "of the data (default: 1)"),
    ("ranks-per-node", "N", "ranks joined by the fast tier (default: what the launcher says)"),
    ("cluster", "FILE", "costs by which the planner predicts and chooses"),
    ("plot", "DIR", "draw the results there; needs the extra 'plot'"),
)
REQUIRED = ("experts", "top-k", "hidden", "tokens")


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "bench",
        help="time stock dispatchers and our chains, side by side",
        description="Check our chains against Megatron's dispatchers, then time all of them in one "
        "run: one process per rank, under torchrun, srun or monta emulate.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, metavar, text in FLAGS:
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    parser.add_argument("--layer", action="store_true", help="time the layer with its experts too")
    parser.add_argument("--ablation", action="store_true", help="the steps of the MoNTA paper")
    parser.add_argument(
        "--bound", action="store_true", help="time the stages of alltoall_allgather alone too"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run on this rank; the first rank prints. Exit status 1 where results are not stock's."""
    from monta_megatron.benchmark.launch import is_first_rank

    if is_first_rank():
        return _run(parsed)
    try:
        status = _run(parsed)
    except ValueError:
        status = 2
    if status != 0:
        time.sleep(OTHER_RANKS_LINGER_S)
    return status


def _run(parsed: argparse.Namespace) -> int:
    from monta_megatron import strict_yaml
    from monta_megatron.benchmark.launch import find_launch
    from monta_megatron.benchmark.plots import check_can_plot, plot_report
    from monta_megatron.benchmark.settings import parse_settings
    from monta_megatron.planner.cluster import Cluster

    for name in REQUIRED:
        if getattr(parsed, name.replace("-", "_")) is None:
            raise ValueError(f"--{name}: not given, must be an integer >= 1")
    if parsed.plot is not None:
        check_can_plot()
    cluster = None if parsed.cluster is None else strict_yaml.load(Cluster, parsed.cluster)
    launch = find_launch()
    settings = parse_settings(parsed, launch.world_size)

    # Standard output is for the report alone; Megatron and the dispatchers print there too.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from monta_megatron.benchmark.run import MismatchError, run_benchmark

        try:
            report = run_benchmark(settings, launch, cluster)
        except MismatchError as error:
            if launch.rank == 0:
                print(f"monta bench: results differ, nothing was timed\n{error}", file=sys.stderr)
            return 1
    if launch.rank == 0:
        _print_report(report, parsed.json)
        if parsed.plot is not None:
            for path in plot_report(report, Path(parsed.plot)):
                print(f"monta bench: drew {path}", file=sys.stderr)
    return 0


def _print_report(report: dict[str, Any], as_json: bool) -> None:
    from monta_megatron.benchmark.ablation import StepResult, ablation_table
    from monta_megatron.benchmark.bound import BoundResult, bound_table
    from monta_megatron.benchmark.report import Row, prediction_table, table

    rows = [Row(**row) for row in report["rows"]]
    blocks = [table(rows), prediction_table(rows)]
    if "ablation" in report:
        blocks.append(ablation_table([StepResult(**step) for step in report["ablation"]]))
    if "bound" in report:
        blocks.append(bound_table([BoundResult(**result) for result in report["bound"]]))
    text = "\n\n".join(filter(None, blocks))
    print(text, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(report, indent=2))
