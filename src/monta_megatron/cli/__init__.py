"""The `monta` command: one file per sub-command; nothing heavy is imported before it is needed.

Exit status 0 on success; 2 on bad input, with one line on stderr that names the field, the value
and the rule; 130 after Ctrl-C. With `--json`, standard output holds one JSON document and nothing
else.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from monta_megatron import __version__
from monta_megatron.cli import (
    bench,
    calibrate,
    compare,
    completion,
    doctor,
    emulate,
    estimate,
    launch,
    new,
    place,
    plan,
    report,
    simulate,
    timeline,
    validate,
)
from monta_megatron.common import first_rank
from monta_megatron.common.names import nearest, one_of

COMMANDS = (
    bench,
    calibrate,
    compare,
    completion,
    doctor,
    emulate,
    estimate,
    launch,
    new,
    place,
    plan,
    report,
    simulate,
    timeline,
    validate,
)

# The statuses with which a shell reports processes ended by SIGINT and SIGPIPE.
INTERRUPTED, UNREAD = 130, 141


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps a description, and leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    """A parser that leaves the usage to `--help` and reports an error in one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "formatter_class": _HelpFormatter})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse what is unknown here, where the flags that are known can be named."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            flag = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
            meant = nearest(flag, self._option_string_actions)
            advice = "" if meant is None else f"; did you mean {meant}?"
            self.error(f"unrecognized arguments: {' '.join(rest)}{advice}")
        return parsed, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does, for choices and sub-commands, in the words of our other messages."""
        if action.choices is not None and value not in action.choices:
            rule = one_of(value, map(str, action.choices))
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}, must be {rule}")

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split()).removeprefix("argument ")
        first_rank.report(f"{self.prog}: {line}")
        self.exit(2)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `monta` with all sub-commands."""
    parser = _Parser(prog="monta", description="Expert-parallel token dispatch for Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"monta-megatron {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def sub_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the sub-commands of `build_parser()` by name, and of theirs: "new model"."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                inner = sub_parsers(command)
                found |= {name: command, **{f"{name} {kind}": of for kind, of in inner.items()}}
    return found


def _run(parsed: argparse.Namespace) -> tuple[int, ValueError | None]:
    try:
        return int(parsed.run(parsed)), None
    except ValueError as mistake:
        return 2, mistake


def main(
    arguments: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None
) -> int:
    """Run one sub-command; returns the exit status.

    Args:
        arguments: what was typed, without the name of the command.
        parser: another one than that of `monta`, with `run` and `command` among its defaults.
    """
    parsed = (parser or build_parser()).parse_args(arguments)
    try:
        status, mistake = _run(parsed)
        sys.stdout.flush()
        if mistake is not None:
            first_rank.report(f"monta {parsed.command}: {mistake}")
        return status
    except KeyboardInterrupt:
        if first_rank.is_first_rank():
            print(f"monta {parsed.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe, as in `monta plan ... | head`: the rest goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
