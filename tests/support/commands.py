"""Commands that run in the process of a test, and what others need."""

import argparse
import json
from importlib.util import find_spec
from typing import Any

import pytest

from monta_megatron.cli import build_parser, main

needs_training = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.training") is None,
    reason="needs megatron.training: pip install 'megatron-core[training]>=0.19'",
)


def sub_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of the sub-commands by name."""
    actions = build_parser()._actions
    return next(dict(each.choices or {}) for each in actions if each.dest == "command")


class Monta:
    """`monta` with some words: exit status, standard output, standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        self._capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            status = int(str(end.code))
        return status, *self._capsys.readouterr()

    def document(self, *words: object) -> dict[str, Any]:
        """The document of a command with --json that succeeds."""
        status, stdout, stderr = self(*words, "--json")
        assert status == 0, stderr
        return dict(json.loads(stdout))

    def refusal(self, *words: object) -> str:
        """The one line of a command that takes its input for bad."""
        status, stdout, stderr = self(*words)
        assert (status, stdout) == (2, ""), stderr
        (line,) = stderr.splitlines()
        assert line.startswith(f"monta {words[0]}: ") and len(line) < 1_000
        return line
