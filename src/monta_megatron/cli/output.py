"""Keeps standard output for the report of a sub-command."""

import contextlib
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def only_the_report() -> Iterator[None]:
    """What Megatron and the dispatchers print goes to standard error, and warnings go nowhere."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
