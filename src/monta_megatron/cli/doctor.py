"""Check the installation.

Check what is installed, which way into Megatron is active, what is missing, and which options are
in force: by a flag of Megatron after --, by a variable or by default. The exit status is 1 if
something is missing.

example: monta doctor -- --moe-monta-chain auto
"""

import argparse
from typing import Any

from monta_megatron.common.text import print_report


def add_arguments(parser: Any) -> None:
    """Add all flags."""
    parser.keep_after_dashes("megatron")


def run(parsed: argparse.Namespace) -> int:
    """Print the report; exit status 1 if something is missing."""
    from monta_megatron.tools.doctor import examine

    report = examine(parsed.megatron)
    print_report(report, parsed.json)
    return int(report.lacks_something)
