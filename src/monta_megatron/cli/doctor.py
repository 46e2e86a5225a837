"""`monta doctor`: installation and machine."""

import argparse
from typing import Any

from monta_megatron.cli.parser import add_json
from monta_megatron.common.tables import print_report


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation",
        description="Check what is installed, which way into Megatron is active, what is missing; "
        "the exit status is 1 if something is.",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print the report; exit status 1 if something is missing."""
    from monta_megatron.tools.doctor import examine

    report = examine()
    print_report(report, parsed.json)
    return int(report.lacks_something)
