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
        usage="monta doctor [-h] [--json] [-- MEGATRON ARGUMENTS]",
        description="Check what is installed, which way into Megatron is active, what is missing, "
        "and which options are in force: by a flag after --, by a variable or by default. The exit "
        "status is 1 if something is missing.",
    )
    parser.after_dashes = "megatron"
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print the report; exit status 1 if something is missing."""
    from monta_megatron.tools.doctor import examine

    report = examine(parsed.megatron)
    print_report(report, parsed.json)
    return int(report.lacks_something)
