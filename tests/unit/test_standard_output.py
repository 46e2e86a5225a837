"""Standard output that takes no more: one line for a full disk, none for a closed pipe."""

import os
import subprocess
import sys

import pytest

PLAN = ["plan", "--model", "qwen3_30b_a3b", "--cluster", "a100_hdr", "--ep", "16"]
# More than a buffer holds.
LONG = [*PLAN, "--json"]


def monta(words: list[str], output: str) -> tuple[int, str]:
    """Exit status and standard error of a command whose output a shell redirects."""
    command = f'"$0" -m monta_megatron "$@" {output}; exit ${{PIPESTATUS[0]}}'
    result = subprocess.run(
        ["bash", "-c", command, sys.executable, *words],
        # With it, argparse itself meets the error, and is silent.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    return result.returncode, result.stderr


@pytest.mark.parametrize("words", [PLAN, LONG, ["plan", "--help"], ["--version"]])
def test_a_full_disk_is_one_line(words: list[str]) -> None:
    status, said = monta(words, "> /dev/full")
    assert (status, said) == (2, f"monta {words[0]}: [Errno 28] No space left on device\n")


def test_a_mistake_is_told_where_the_disk_is_full() -> None:
    status, said = monta(["plan"], "> /dev/full")
    assert (status, said) == (2, "monta plan: --model: not given, must be a file or a preset\n")


@pytest.mark.parametrize("words", [PLAN, LONG, ["plan", "--help"]])
def test_a_closed_pipe_is_no_mistake(words: list[str]) -> None:
    assert monta(words, "| :") == (141, "")


def test_no_standard_output_is_no_mistake() -> None:
    assert monta(PLAN, ">&-") == (0, "")


@pytest.mark.parametrize("command", ["plan", "timeline"])
def test_a_folder_that_cannot_be_written_is_one_line(command: str) -> None:
    status, said = monta([command, *PLAN[1:], "--out", "/proc/monta.png"], "")
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith(f"monta {command}: ") and "No such file or directory" in said
