"""`monta estimate`: is it worth it, the time of a whole training iteration by part."""

import argparse
from typing import Any

from monta_megatron.cli.launch import CONFIG, megatron_words
from monta_megatron.cli.output import add_json, print_json
from monta_megatron.cli.planning import BATCH, FILES, IGNORE_MEMORY, SIZES
from monta_megatron.common.flags import positive, whole

EXAMPLE = """\
What follows -- are arguments of Megatron, as for monta launch. Everything that
is printed is predicted: nothing runs.

examples:
  monta estimate --config qwen3_235b_a22b
  monta estimate --config deepseek_v3 --cluster h100_8x_ndr --world-size 1024 \\
      --tp 2 --ep 64 --pp 8 --mfu 0.4
  monta estimate --config mixtral_8x22b --set host_layer_us=3000 --json
"""
OVERRIDES = {**SIZES, **BATCH, "global-batch-size": "sequences of an iteration"}


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
    parser.add_argument("--config", metavar="FILE", required=True, help=CONFIG)
    cluster = f"{FILES['cluster']} (default: the run's)"
    parser.add_argument("--cluster", metavar="FILE", help=cluster)
    parser.add_argument(
        "--gpu", metavar="NAME", help="of the cluster (default: the one that its name holds)"
    )
    for name, text in OVERRIDES.items():
        text = f"{text.partition(' (default')[0]} (default: the run's)"
        parser.add_argument(f"--{name}", metavar="N", type=whole(1), help=text)
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
    parser.add_argument("--ignore-memory", action="store_true", help=IGNORE_MEMORY)
    add_json(parser)
    parser.add_argument("megatron", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
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
    """Print the estimate."""
    from monta_megatron.tools.estimate.estimate import EstimateRequest, document, estimate
    from monta_megatron.tools.estimate.report import estimate_lines

    if parsed.mfu is not None and parsed.mfu > 1:
        raise ValueError(f"--mfu: got {parsed.mfu:g}, must be at most 1, a share of the peak")
    names = [name.replace("-", "_") for name in OVERRIDES]
    predicted = estimate(
        EstimateRequest(
            config=parsed.config,
            words=megatron_words(parsed),
            cluster=parsed.cluster,
            gpu=parsed.gpu,
            sizes={name: size for name in names if (size := getattr(parsed, name)) is not None},
            mfu=parsed.mfu,
            changes=dict(parsed.set),
            kernels=parsed.kernels,
            ignore_memory=parsed.ignore_memory,
        )
    )
    if parsed.json:
        print_json(document(predicted))
    else:
        print("\n".join(estimate_lines(predicted)))
    return 0
