"""What commands print, kept beside the tests; UPDATE_GOLDEN=1 writes it anew for a diff."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest


def check(path: Path, printed: str) -> None:
    """Compare a text with the file that holds it."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(printed, encoding="utf-8")
    assert printed == path.read_text(encoding="utf-8")


def check_lines(path: Path, lines: Mapping[str, str]) -> None:
    """Compare lines, each below its name, with the file that holds them."""
    assert not any("\n" in line for line in lines.values()), lines
    check(path, "".join(f"{name}\n    {line}\n" for name, line in lines.items()))


def check_cases(path: Path, answer: Callable[[str], str]) -> None:
    """Compare the answer to each case with a file of both, a case above its answer."""
    cases = path.read_text(encoding="utf-8").splitlines()[::2]
    assert cases, path
    check_lines(path, {case: answer(case) for case in cases})


def check_session(path: Path, answer: Callable[[str], str]) -> None:
    """Compare the answers to commands with a file of both, commands behind `$ monta`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.startswith("$ monta")]
    assert commands, path
    answers = (f"{line}\n{answer(line.removeprefix('$ monta'))}\n" for line in commands)
    check(path, "".join(answers))


def refusal(call: Callable[..., object], *args: Any, **fields: Any) -> str:
    """The message of a call that refuses what it is given."""
    with pytest.raises(ValueError) as error:
        call(*args, **fields)
    return str(error.value)
