"""The `monta` command: one file per sub-command, nothing heavy imported before it is needed.

Exit status 0 on success; 2 on bad input, with one line on stderr that names the field, the value
and the rule. With `--json`, standard output holds one JSON document and nothing else.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from monta_megatron import __version__
from monta_megatron.cli import bench, calibrate, doctor, emulate, plan

COMMANDS = (bench, calibrate, doctor, emulate, plan)


class _Parser(argparse.ArgumentParser):
    """A parser that leaves the usage to `--help` and says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command; the value is the exit status."""
    parser = _Parser(prog="monta", description="Expert-parallel token dispatch for Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"monta-megatron {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except ValueError as error:
        print(f"monta {parsed.command}: {error}", file=sys.stderr)
        return 2
