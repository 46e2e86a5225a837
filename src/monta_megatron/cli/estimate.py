"""`monta estimate`: is it worth it, the time of a whole training iteration by part."""

import argparse
import sys
from typing import Any

from monta_megatron.cli import planning
from monta_megatron.cli.launch import add_config, run_file
from monta_megatron.cli.parser import add_json
from monta_megatron.common.flags import positive
from monta_megatron.common.tables import print_report

EXAMPLE = """\
Arguments after -- are those of Megatron, as for monta launch. All figures are
predicted: nothing runs.

examples:
  monta estimate --config qwen3_235b_a22b
  monta estimate --config deepseek_v3 --cluster h100_8x_ndr --world-size 1024 \\
      --tp 2 --ep 64 --pp 8 --mfu 0.4
  monta estimate --model qwen3_30b_a3b --cluster h100_8x_ndr --world-size 64
  monta estimate --config mixtral_8x22b --set host_layer_us=3000 --json
"""
OVERRIDES = {**planning.SIZES, **planning.BATCH, "global-batch-size": "sequences of an iteration"}


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "estimate",
        help="predict a whole iteration by part, and what is saved of it",
        description="Predict the iteration of a run by part: with stock's alltoall, with the "
        "planner's choice, with experts in the pipeline, with Megatron's 1F1B overlap, and with "
        "the flex backends by their published figures; what is saved, and what was assumed.",
        epilog=EXAMPLE,
    )
    add_config(parser)
    parser.add_argument(
        "--model",
        metavar="FILE",
        help="with --cluster, in place of a run file: the run that monta new run writes for it; "
        "without --tp, --ep and --etp every layout that fits, ranked by its iteration",
    )
    cluster = f"{planning.FILES['cluster']} (default: the run's)"
    parser.add_argument("--cluster", metavar="FILE", help=cluster)
    parser.add_argument(
        "--gpu", metavar="NAME", help="of the cluster (default: the one that its name holds)"
    )
    defaults = {**planning.JOB, **OVERRIDES}
    planning.add_sizes(
        parser,
        {
            name: f"{text.partition(' (d')[0]} (default: the run's)"
            for name, text in defaults.items()
        },
    )
    parser.add_argument(
        "--mfu",
        metavar="X",
        type=positive,
        help="share of the GPU's peak that products and attention reach, for their efficiencies",
    )
    parser.add_argument(
        "--kernels",
        choices=("auto", "torch", "fused"),
        help="what copies and sums rows (default: the run's --moe-monta-kernels, or auto)",
    )
    add_set(parser)
    parser.add_argument("--ignore-memory", action="store_true", help=planning.IGNORE_MEMORY)
    add_json(parser)
    parser.set_defaults(run=run)


def add_set(parser: Any) -> None:
    """Add --set to a parser."""
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        type=_change,
        default=[],
        help="another value for an assumption; may be given several times",
    )


def _change(text: str) -> tuple[str, float]:
    """An argparse type."""
    from monta_megatron.planner.assumptions import change_of

    try:
        return change_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(parsed: argparse.Namespace) -> int:
    """Print the estimate, or the layouts by their estimates."""
    from functools import partial

    from monta_megatron.common.tables import show_progress
    from monta_megatron.planner.cluster_file import load_cluster
    from monta_megatron.tools.estimate.estimate import EstimateRequest
    from monta_megatron.tools.estimate.report import answer

    if parsed.mfu is not None and parsed.mfu > 1:
        raise ValueError(f"--mfu: got {parsed.mfu:g}, must be at most 1, a share of the peak")
    config = _config(parsed)
    names = [name.replace("-", "_") for name in OVERRIDES]
    sizes = {name: size for name in names if (size := getattr(parsed, name)) is not None}
    world_size = planning.world_size_of(
        parsed, lambda: load_cluster(_cluster(parsed)).ranks_per_node
    )
    request = EstimateRequest(
        config=config,
        model=parsed.model,
        words=parsed.megatron,
        cluster=parsed.cluster,
        gpu=parsed.gpu,
        sizes={**sizes, **({} if world_size is None else {"world_size": world_size})},
        mfu=parsed.mfu,
        changes=dict(parsed.set),
        kernels=parsed.kernels,
        ignore_memory=parsed.ignore_memory,
    )
    progress = partial(show_progress, "estimate", sys.stderr.isatty())
    print_report(answer(request, progress), parsed.json)
    return 0


def _config(parsed: argparse.Namespace) -> str | None:
    """The run file; None where a model and a cluster stand in its place."""
    if parsed.model is None:
        return run_file(parsed)
    if parsed.config is not None or parsed.run_file is not None:
        raise ValueError(f"--model: got {parsed.model}, must be left out with a run file")
    if parsed.cluster is None:
        raise ValueError("--cluster: not given, must be with --model")
    return None


def _cluster(parsed: argparse.Namespace) -> str:
    """The cluster file whose ranks of a node --nodes counts."""
    if parsed.cluster is None:
        raise ValueError(f"--nodes: got {parsed.nodes}, must be with --ranks-per-node or --cluster")
    return str(parsed.cluster)
