"""The parser of `monta` and its sub-commands: flags, messages of mistakes, standard output."""

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from monta_megatron.common import ranks
from monta_megatron.common.text import nearest


@contextlib.contextmanager
def only_the_report() -> Iterator[None]:
    """Send output of Megatron and the dispatchers to standard error, and drop warnings."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Parser(argparse.ArgumentParser):
    """A parser that leaves the usage to `--help` and reports an error in one line.

    Flags are written in full, and a description is shown with its own lines.
    """

    def __init__(self, **settings: Any) -> None:
        settings |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**settings, add_help=False)
        self.add_argument("-h", "--help", action="help", help="Print this help and exit.")
        self._after_dashes: str | None = None

    def keep_after_dashes(self, name: str) -> None:
        """Keep the words after `--` under a name; call this after all flags are added."""
        self._after_dashes = name
        usage = self.format_usage().removeprefix("usage: ").strip()
        self.usage = f"{usage} [-- {name.upper()} ...]"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse unknown flags here, where the known ones can be named."""
        words, rest = list(sys.argv[1:] if args is None else args), []
        if self._after_dashes is not None and "--" in words:
            place = words.index("--")
            words, rest = words[:place], words[place + 1 :]
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            given = next((word for word in unknown if word.startswith("-")), unknown[0])
            name = given.partition("=")[0].casefold().replace("_", "-").lstrip("-")
            meant = nearest(name, [flag.lstrip("-") for flag in self._option_string_actions])
            advice = "" if meant is None else f"; did you mean --{meant}?"
            if self._after_dashes is not None:
                advice += f"; those of {self._after_dashes.upper()} go after --"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
        if self._after_dashes is not None:
            setattr(parsed, self._after_dashes, rest)
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split()).removeprefix("argument ")
        ranks.report(f"{self.prog}: {line}")
        self.exit(2)
