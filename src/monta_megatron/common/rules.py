"""Rules of values that users give: in a file, on a command line, between fields. No torch."""

import argparse
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from monta_megatron.common.errors import UserError
from monta_megatron.common.text import one_of

T = TypeVar("T")


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Refuse a value that breaks a rule, such as one between several fields of a dataclass.

    Args:
        holds: whether it satisfies it.
        name: the field, for the message; `strict_yaml` puts the path to the dataclass before it.
        value: what it is.
        rule: what the user reads after "must".

    Raises:
        UserError: the rule does not hold.
    """
    if not holds:
        raise UserError(f"{name}: got {value}, must {rule}")


@dataclass(frozen=True)
class Rule:
    """A rule for a value in a file, beyond its type: an annotation that `strict_yaml` checks.

    Attributes:
        text: what the user reads after "must be".
        holds: whether a value satisfies it.
    """

    text: str
    holds: Callable[[Any], bool]


SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
PositiveInt = Annotated[int, Rule("an integer >= 1", lambda value: value >= 1)]
PositiveFloat = Annotated[float, Rule("a number > 0", lambda value: value > 0)]
NonNegativeFloat = Annotated[float, Rule("a number >= 0", lambda value: value >= 0)]
Text = Annotated[str, Rule("a text that is not empty", lambda value: value.strip() != "")]


def checked(read: Callable[[str], T], holds: Callable[[T], bool], rule: str) -> Callable[[str], T]:
    """A type of argparse: `read`, whose value has to satisfy a rule."""

    def read_checked(text: str) -> T:
        with suppress(ValueError):
            value = read(text)
            if holds(value):
                return value
        raise argparse.ArgumentTypeError(f"got {text!r}, must be {rule}")

    return read_checked


def whole(least: int) -> Callable[[str], int]:
    """Reads an integer >= `least`."""
    return checked(int, lambda number: number >= least, f"an integer >= {least}")


def _tokens(text: str) -> int:
    number = text.removesuffix("k")
    return int(number) * (1 if number == text else 1024)


# Reads a number of tokens; "4k" is 4096 of them, as in names of models.
num_tokens = checked(
    _tokens, lambda number: number >= 1, "an integer >= 1, or one such as 4k for 4096"
)
# Reads a number > 0.
positive = checked(float, lambda number: 0 < number < float("inf"), "a number > 0")


def name_of(known: Callable[[], Iterable[str]]) -> Callable[[str], str]:
    """Reads one of the names that `known` returns."""

    def read(text: str) -> str:
        names = list(known())
        return checked(str, names.__contains__, one_of(text, names))(text)

    return read


def listed(read_one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Reads a list such as "a,b"; what is written twice counts once."""

    def read(text: str) -> tuple[T, ...]:
        return tuple(dict.fromkeys(read_one(part.strip()) for part in text.split(",")))

    return read
