"""Texts of a command line as values, and the rule that a wrong text breaks. No torch."""

import argparse
from collections.abc import Callable, Iterable
from typing import TypeVar

from monta_megatron.common.names import one_of
from monta_megatron.common.texts import PRINTABLE

T = TypeVar("T")


def whole(least: int) -> Callable[[str], int]:
    """Reads an integer >= `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, must be an integer >= {least}")
        return int(text)

    return read


def printable(text: str) -> str:
    """Reads a text that may be shown and written to files."""
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"got {text!r}, must be {PRINTABLE}")
    return text


def positive(text: str) -> float:
    """Reads a number > 0."""
    return _number(text, "a number > 0", lambda value: 0 < value < float("inf"))


def not_negative(text: str) -> float:
    """Reads a number >= 0."""
    return _number(text, "a number >= 0", lambda value: 0 <= value < float("inf"))


def fraction(text: str) -> float:
    """Reads a number from 0 to 1."""
    return _number(text, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def _number(text: str, rule: str, holds: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not holds(value):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be {rule}")
    return value


def name_of(known: Callable[[], Iterable[str]]) -> Callable[[str], str]:
    """Reads one of the names that `known` returns."""

    def read(text: str) -> str:
        names = list(known())
        if text not in names:
            raise argparse.ArgumentTypeError(f"got {text!r}, must be {one_of(text, names)}")
        return text

    return read


def listed(read_one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Reads a list such as "a,b"; what is written twice counts once."""

    def read(text: str) -> tuple[T, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise argparse.ArgumentTypeError(
                f"got {text!r}, must be a list such as a,b without empty parts"
            )
        return tuple(dict.fromkeys(map(read_one, parts)))

    return read
