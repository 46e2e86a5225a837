"""Why a run ended, from what its ranks printed."""

import pytest

from monta_megatron.common.torchrun import cause_of, ended

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    {line}
{error}
"""
LOST = TRACEBACK.format(line="wait()", error="RuntimeError: connection closed by peer")
NAMED = TRACEBACK.format(line="run()", error="ExchangeError: dispatch: chain alltoall failed")
CHAINED = f"{LOST}\nThe above exception was the direct cause of the following exception:\n\n{NAMED}"


def of_rank(rank: int, text: str) -> str:
    """As torch prints it once a rank has joined."""
    return "".join(f"[rank{rank}]: {line}" for line in text.splitlines(keepends=True))


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("", None),
        ("iteration 1\niteration 2\n", None),
        (f"iteration 1\n{LOST}more\n", "RuntimeError: connection closed by peer"),
        (CHAINED, "ExchangeError: dispatch: chain alltoall failed"),
        # The first rank's, with what is chained to it, and not what another rank says of it.
        (
            of_rank(2, CHAINED) + of_rank(0, LOST),
            "[rank2]: ExchangeError: dispatch: chain alltoall failed",
        ),
        (LOST + NAMED, "RuntimeError: connection closed by peer"),
        (
            "monta: error: moe_monta_chain: got 'x'\n" + LOST,
            "monta: error: moe_monta_chain: got 'x'",
        ),
        # No message, and lines of two ranks mixed.
        (TRACEBACK.format(line="assert x", error="AssertionError"), "AssertionError"),
        (
            "[rank1]: Traceback (most recent call last):\n[rank0]: Traceback (most recent call last"
            "):\n[rank1]:   File\n[rank0]: KeyError: 1\n[rank1]: ValueError: no\n",
            "[rank1]: ValueError: no",
        ),
        # Likewise, where neither has joined.
        (
            "Traceback (most recent call last):\nTraceback (most recent call last):\n"
            "  File\n  File\nValueError: no\nValueError: no\n",
            "ValueError: no",
        ),
    ],
)
def test_cause(log: str, cause: str | None) -> None:
    assert cause_of(log.splitlines()) == cause


def test_how_it_ended() -> None:
    assert ended(3) == "with exit status 3"
    assert ended(137) == "by signal 9 (SIGKILL)"
    assert ended(255) == "with exit status 255"
