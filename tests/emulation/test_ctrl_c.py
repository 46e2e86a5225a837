"""Ctrl-C at several moments of `calibrate` and `emulate`: one line, status 130, nothing stays.

A terminal sends SIGINT to the whole process group, also to ranks that have not got far.
"""

import os
import re
from pathlib import Path

import pytest
from interrupts import interrupt, marked, network_names, started, wait_for
from namespaces import skip_without_namespaces

from monta_megatron.planner.cluster_file import load_cluster

CALIBRATE = ["calibrate", "--out", "c.yaml", "--ranks-per-node", "1", "--nics-per-node", "1"]
LONG, SHORT = (["--budget-seconds", seconds] for seconds in ("1000", "1"))
EMULATE = ["emulate", "--nodes", "2", "--ranks-per-node", "1", "--inter-mbit", "200", "--"]
# Lines that are no answer to the interrupt: of -X importtime, of an emulated rank, and notes.
EXPECTED = re.compile(
    r"import time:|\[node \d rank \d\] |monta-megatron: CPU ranks|monta calibrate: "
    r"(\d+ sizes|more runs|wrote)|monta emulate: 2 nodes|.*(size \(B\)|\d \d)"
)

# What there is to see of a moment: the words of a line on standard error, or ranks that started.
Moment = str | int


def is_reached(moment: Moment, stderr: Path, mark: str) -> bool:
    if isinstance(moment, str):
        return moment in stderr.read_text()
    return all(marked(mark, RANK=str(rank)) for rank in range(moment))


def check(words: list[str], moment: Moment, command: str, folder: Path, **environment: str) -> None:
    stderr, before = folder / "stderr", network_names()
    with started(words, folder, **environment) as (process, mark):
        wait_for(process, lambda: is_reached(moment, stderr, mark), stderr)
        status = interrupt(process, os.killpg, mark)
    lines = stderr.read_text().splitlines()
    assert network_names() == before
    # Whole, or not there.
    files = {path.name for path in folder.iterdir()} - {"stdout", "stderr"}
    if moment == "wrote c.yaml":
        assert files == {"c.yaml"} and load_cluster(folder / "c.yaml").num_nodes == 2
        # It may have ended by itself.
        assert status in (0, 130)
        return
    assert (status, files) == (130, set()), lines
    said = [line for line in lines if not EXPECTED.match(line)]
    assert len(said) == 1 and said[0].startswith(f"monta {command}: interrupted"), said


@pytest.mark.parametrize(
    ("budget", "moment"),
    [
        # The first rank has imported torch.
        (LONG, "CPU ranks stand in"),
        (LONG, "sizes of operations"),
        (LONG, "more runs"),
        (SHORT, "wrote c.yaml"),
    ],
)
def test_calibrate(budget: list[str], moment: Moment, tmp_path: Path) -> None:
    torchrun = ["-m", "monta_megatron.common.torchrun", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "-m", "monta_megatron", *CALIBRATE, *budget]
    check(words, moment, "calibrate", tmp_path, MONTA_CPU_RANKS="1")


@pytest.mark.parametrize(
    ("budget", "moment"),
    [
        (LONG, "monta_megatron.cli.parser"),
        (LONG, "monta_megatron.emulation.emulator"),
        (LONG, "2 nodes x 1 rank"),
        (LONG, 2),
        (LONG, "more runs"),
        (SHORT, "wrote c.yaml"),
    ],
)
def test_emulate(budget: list[str], moment: Moment, tmp_path: Path) -> None:
    skip_without_namespaces()
    words = ["-X", "importtime", "-m", "monta_megatron", *EMULATE, "monta", *CALIBRATE, *budget]
    check(words, moment, "emulate", tmp_path)
