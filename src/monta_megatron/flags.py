"""Texts of a command line as numbers, and the rule that a wrong text breaks. No torch."""

import argparse
from collections.abc import Callable


class BadValueError(argparse.ArgumentTypeError, ValueError):
    """A text that breaks its rule. argparse shows the message; to other callers it is a ValueError.

    argparse replaces the message of a plain ValueError.
    """


def whole(least: int) -> Callable[[str], int]:
    """Reads an integer >= `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise BadValueError(f"got {text!r}, must be an integer >= {least}")
        return int(text)

    return read


def positive(text: str) -> float:
    """Reads a number > 0."""
    return _number(text, "a number > 0", lambda value: 0 < value < float("inf"))


def fraction(text: str) -> float:
    """Reads a number from 0 to 1."""
    return _number(text, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def _number(text: str, rule: str, holds: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not holds(value):
        raise BadValueError(f"got {text!r}, must be {rule}")
    return value
