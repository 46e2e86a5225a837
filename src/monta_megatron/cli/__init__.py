"""The `monta` command: one file per sub-command; nothing heavy is imported before it is needed.

Exit status 0 on success; 2 on bad input, with one line on stderr that names the field, the value
and the rule; 130 after Ctrl-C. With `--json`, standard output holds one JSON document and nothing
else.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from monta_megatron.common import __version__, first_rank

COMMANDS = (
    "bench",
    "calibrate",
    "compare",
    "doctor",
    "emulate",
    "launch",
    "place",
    "plan",
    "timeline",
)

# The statuses with which a shell reports processes ended by SIGINT and SIGPIPE.
INTERRUPTED, UNREAD = 130, 141


def build_parser() -> argparse.ArgumentParser:
    """The parser of `monta` with all sub-commands."""
    from monta_megatron.cli.parser import Parser

    parser = Parser(prog="monta", description="Expert-parallel token dispatch for Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"monta-megatron {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"monta_megatron.cli.{name}").add_parser(commands)
    # It checks a command of ours with it.
    commands.choices["emulate"].set_defaults(parser=parser)
    return parser


def sub_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the sub-commands of `build_parser()` by name."""
    return next(
        dict(action.choices)
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )


def main(
    arguments: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None
) -> int:
    """Run one sub-command; returns the exit status.

    Args:
        arguments: what was typed, without the name of the command.
        parser: another one than that of `monta`, with `run` and `command` among its defaults.
    """
    words = sys.argv[1:] if arguments is None else arguments
    command = " ".join(["monta", *words[:1]])
    try:
        parsed = (parser or build_parser()).parse_args(words)
        command = f"monta {parsed.command}"
        try:
            status, mistake = int(parsed.run(parsed)), None
        except ValueError as error:
            status, mistake = 2, error
        sys.stdout.flush()
        if mistake is not None:
            first_rank.report(f"{command}: {mistake}")
        return status
    except KeyboardInterrupt:
        # A launcher passes on what has reached this process already.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if first_rank.is_first_rank():
            print(f"{command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe, as in `monta plan ... | head`: the rest goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
