"""Whether others use the machine: planted statistics, and cores that are really in use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monta_megatron.common import busy
from monta_megatron.common.busy import busy_text, cores_in_use

BUSY = "the machine was busy before: others used 0.5 of its 4 cores"


@pytest.mark.parametrize(
    ("in_use", "num_ranks", "text"),
    [
        # As many ranks as cores, or more, need 0.9 of all; fewer ranks need as many cores.
        ((0.1, 0.1, 0.1, 0.05), 4, None),
        ((0.5, 0.0, 0.0, 0.0), 4, BUSY),
        ((0.5, 0.0, 0.0, 0.0), 8, BUSY),
        ((0.5, 0.0, 0.0, 0.0), 3, None),
        # A system that does not tell.
        ((), 4, None),
    ],
)
def test_free_cores_are_those_that_the_ranks_need(
    in_use: tuple[float, ...], num_ranks: int, text: str | None
) -> None:
    assert busy_text(dict(enumerate(in_use)), num_ranks) == text


def test_ticks_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 ticks of core 0, 40 are idle, 20 wait for a disk, and 10 went to another guest."""
    path = tmp_path / "stat"
    path.write_text("cpu  1 1\ncpu0 100 0 0 500 0 0 0 0 0 0\ncpu7 1 1 1 1 1 1 1 1\nctxt 5\n")
    monkeypatch.setattr(busy, "STATISTICS", path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    later = "cpu0 120 1 5 540 20 1 3 10 0 0\n"
    monkeypatch.setattr(busy.time, "sleep", lambda seconds: path.write_text(later))
    assert cores_in_use() == {0: 0.4}
    monkeypatch.setattr(busy, "STATISTICS", tmp_path / "absent")
    assert cores_in_use() == {}


def test_a_busy_loop_on_every_core_is_seen() -> None:
    cores = len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        in_use = cores_in_use()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert busy_text(in_use, cores) is not None
