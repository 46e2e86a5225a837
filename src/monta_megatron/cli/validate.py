"""`monta validate`: predictions against published figures."""

import argparse
from typing import Any

from monta_megatron.cli.estimate import add_set
from monta_megatron.cli.parser import add_json, print_json

EXAMPLE = """\
The exit status is 1 where a row is past its tolerance. Constants were fitted
on the rows marked so, and on no others.

examples:
  monta validate
  monta validate --set overlap_share=0.8 --json
"""
PAST_TOLERANCE = 1


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "validate",
        help="hold the predictions of estimate against published figures",
        description="Predict published iterations, MoE layers and bandwidths, and exchanges that "
        "were measured on the emulated cluster, and print predicted, published and error of each. "
        "The figures are in configs/estimate/published.yaml, with their sources.",
        epilog=EXAMPLE,
    )
    add_set(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print every row."""
    from monta_megatron.tools.estimate.report import validation_lines
    from monta_megatron.tools.estimate.validation import Predictor, document

    rows = Predictor(dict(parsed.set)).all_rows()
    if parsed.json:
        print_json(document(rows))
    else:
        print("\n".join(validation_lines(rows)))
    return 0 if all(row.within for row in rows) else PAST_TOLERANCE
