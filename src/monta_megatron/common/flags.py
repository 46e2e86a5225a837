"""Parse the texts of command-line flags: sizes, lists, names of dtypes. No torch."""

import argparse
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from monta_megatron.common.text import one_of

T = TypeVar("T")


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


def num_tokens(least: int) -> Callable[[str], int]:
    """Reads a number of tokens >= `least`; "4k" is 4096 of them, as in names of models."""

    def read(text: str) -> int:
        number = text.removesuffix("k")
        return int(number) * (1 if number == text else 1024)

    rule = f"an integer >= {least}, or one such as 4k for 4096"
    return checked(read, lambda number: number >= least, rule)


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


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp32": 4, "bf16": 2, "fp16": 2}


def torch_name(dtype: str) -> str:
    """PyTorch's name of a dtype."""
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(dtype, dtype)
