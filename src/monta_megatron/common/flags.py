"""Parse the texts of command-line flags: sizes, lists, names of dtypes. No torch."""

import argparse
from collections.abc import Callable, Iterable
from typing import TypeVar

from monta_megatron.common.text import PRINTABLE, one_of, same_name

T = TypeVar("T")


def whole(least: int) -> Callable[[str], int]:
    """Reads an integer >= `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, must be an integer >= {least}")
        return int(text)

    return read


def num_tokens(least: int) -> Callable[[str], int]:
    """Reads a number of tokens >= `least`; "4k" is 4096 of them, as in names of models."""

    def read(text: str) -> int:
        number = text[:-1] if text[-1:] in ("k", "K") else text
        if not number.isdecimal() or int(number) < least:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, must be an integer >= {least}, or one such as 4k for 4096"
            )
        return int(number) * (1 if number == text else 1024)

    return read


def printable(text: str) -> str:
    """Reads a text that may be shown and written to files."""
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"got {text!r}, must be {PRINTABLE}")
    return text


def positive(text: str) -> float:
    """Reads a number > 0."""
    return _number(text, "a number > 0", lambda value: 0 < value < float("inf"))


def _number(text: str, rule: str, holds: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not holds(value):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be {rule}")
    return value


def name_of(known: Callable[[], Iterable[str]]) -> Callable[[str], str]:
    """Reads one of the names that `known` returns, whatever its case, `-` or `_`."""

    def read(text: str) -> str:
        names = list(known())
        name = text if text in names else same_name(text, names)
        if name is None:
            raise argparse.ArgumentTypeError(f"got {text!r}, must be {one_of(text, names)}")
        return name

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


DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
}

_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def torch_name(dtype: str) -> str:
    """PyTorch's name of a dtype."""
    return _TORCH_NAMES.get(dtype, dtype)
