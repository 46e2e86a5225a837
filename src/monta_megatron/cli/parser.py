"""The parser of `monta` and its sub-commands: flags, messages of mistakes, standard output."""

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from monta_megatron.common import first_rank
from monta_megatron.common.text import nearest, one_of


def add_json(parser: Any) -> None:
    """Add --json to a parser, or to a group of one."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


@contextlib.contextmanager
def only_the_report() -> Iterator[None]:
    """Send output of Megatron and the dispatchers to standard error, and drop warnings."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps a description, and leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser that leaves the usage to `--help` and reports an error in one line.

    Flags are written in full.

    Attributes:
        after_dashes: where the words after `--` are kept; None where argparse reads them.
    """

    def __init__(self, **settings: Any) -> None:
        settings |= {"formatter_class": _HelpFormatter, "allow_abbrev": False}
        super().__init__(**settings)
        self.after_dashes: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse unknown flags here, where the known ones can be named."""
        words = list(sys.argv[1:] if args is None else args)
        rest: list[str] = []
        if self.after_dashes is not None and "--" in words:
            place = words.index("--")
            words, rest = words[:place], words[place + 1 :]
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            flag = next((word for word in unknown if word.startswith("-")), unknown[0])
            name = flag.partition("=")[0].casefold().replace("_", "-").lstrip("-")
            meant = nearest(name, [each.lstrip("-") for each in self._option_string_actions])
            advice = "" if meant is None else f"; did you mean --{meant}?"
            if self.after_dashes is not None:
                advice += "; arguments of Megatron go after --"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
        if self.after_dashes is not None:
            setattr(parsed, self.after_dashes, rest)
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does, for choices and sub-commands, in the words of our other messages."""
        if action.choices is not None and value not in action.choices:
            rule = one_of(value, map(str, action.choices))
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}, must be {rule}")

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split()).removeprefix("argument ")
        first_rank.report(f"{self.prog}: {line}")
        self.exit(2)
