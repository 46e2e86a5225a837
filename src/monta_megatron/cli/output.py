"""The report of a sub-command: the flag for its form, and standard output kept for it."""

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any


def add_json(parser: Any) -> None:
    """Add --json to a parser, or to a group of one."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def print_json(document: Any) -> None:
    """Print the one JSON document of --json."""
    print(json.dumps(document, indent=2))


@contextlib.contextmanager
def only_the_report() -> Iterator[None]:
    """What Megatron and the dispatchers print goes to standard error, and warnings go nowhere."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
