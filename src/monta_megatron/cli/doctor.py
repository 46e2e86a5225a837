"""`monta doctor`: what is installed, which way in is active, what is missing and how to get it."""

import argparse
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from monta_megatron.cli.output import add_json, print_json

if TYPE_CHECKING:
    from monta_megatron.tools.doctor import Finding

WIDTH = 80


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation",
        description="Check what is installed, which way into Megatron is active, what is missing.",
        epilog="example: monta doctor --json",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print the report; exit status 1 if something is missing."""
    from monta_megatron.common.tables import table
    from monta_megatron.tools.doctor import examine

    findings = examine()
    if parsed.json:
        print_json([asdict(finding) for finding in findings])
    else:
        print(table((">status", "what", "found"), _rows(findings)))
    return int(any(finding.status == "missing" for finding in findings))


def _rows(findings: "list[Finding]") -> Iterator[tuple[str, str, str]]:
    """A row for each finding, or several where its text is long."""
    width = WIDTH - len("missing") - max(len(entry.name) for entry in findings) - len("    ")
    for entry in findings:
        first: tuple[str, str] = (entry.status, entry.name)
        text = "; ".join(filter(None, (entry.found, entry.advice)))
        for line in textwrap.wrap(text, width, break_on_hyphens=False):
            yield (*first, line)
            first = ("", "")
