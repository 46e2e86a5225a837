"""The `monta` command: one file per sub-command, nothing heavy imported before it is needed.

Exit status 0 on success; 2 on bad input, with one line on stderr that names the field, the value
and the rule. With `--json`, standard output holds one JSON document and nothing else.
"""

import argparse
import sys
from collections.abc import Sequence

from monta_megatron import __version__
from monta_megatron.cli import doctor

COMMANDS = (doctor,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command; the value is the exit status."""
    parser = argparse.ArgumentParser(
        prog="monta", description="Expert-parallel token dispatch for Megatron-Core."
    )
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
