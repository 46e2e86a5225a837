"""Ctrl-C at several moments of `calibrate` and `emulate`: one line, status 130, nothing stays.

A terminal sends SIGINT to the whole process group, also to ranks that have not got far.
"""

import os
import re
from pathlib import Path

import pytest
from interrupts import interrupt, lines_of, marked, network_names, started, wait_for
from namespaces import skip_without_namespaces

from monta_megatron.planner.cluster_file import load_cluster

COMMANDS = {
    "calibrate": "-m monta_megatron.common.torchrun --standalone --nproc-per-node 2 ",
    "emulate": "-X importtime -m monta_megatron emulate --nodes 2 --ranks-per-node 1"
    " --inter-mbit 200 -- ",
}
OPTIONS = "--out c.yaml --ranks-per-node 1 --nics-per-node 1 --budget-seconds"
# With planted times: what a busy machine measures in a second may be refused.
PLANTED = Path(__file__).parents[1] / "calibration" / "calibrate_with_times.py"
# Lines that are no answer to the interrupt: of -X importtime, of an emulated rank, and notes.
EXPECTED = re.compile(
    r"import time:|\[node \d rank \d\] |monta-megatron: CPU ranks|monta calibrate: "
    r"(\d+ sizes|more runs|wrote|the machine was busy)|monta emulate: 2 nodes|.*(size \(B\)|\d \d)"
)


@pytest.mark.parametrize(
    ("command", "moment"),
    [
        # The first rank has imported torch.
        ("calibrate", "CPU ranks stand in"),
        ("calibrate", "sizes of operations"),
        ("calibrate", "more runs"),
        ("calibrate", "wrote c.yaml"),
        ("emulate", "monta_megatron.cli.parser"),
        ("emulate", "monta_megatron.emulation.emulator"),
        ("emulate", "2 nodes x 1 rank"),
        ("emulate", "ranks have started"),
        ("emulate", "more runs"),
        ("emulate", "wrote c.yaml"),
    ],
)
def test_one_line_and_nothing_stays(command: str, moment: str, tmp_path: Path) -> None:
    if command == "emulate":
        skip_without_namespaces()
    stderr, before = tmp_path / "stderr", network_names()
    program, budget_s = "-m monta_megatron calibrate", 1000
    if moment == "wrote c.yaml":
        program, budget_s = str(PLANTED), 1
    words = f"{COMMANDS[command]}{program} {OPTIONS} {budget_s}".split()
    with started(words, tmp_path, MONTA_CPU_RANKS="1") as (process, mark):

        def is_reached() -> bool:
            if moment == "ranks have started":
                return all(marked(mark, RANK=rank) for rank in "01")
            return moment in lines_of(stderr)

        wait_for(process, is_reached, stderr)
        status = interrupt(process, os.killpg, mark)
    lines = stderr.read_text().splitlines()
    assert network_names() == before
    # Whole, or not there.
    files = {path.name for path in tmp_path.iterdir()} - {"stdout", "stderr"}
    if moment == "wrote c.yaml":
        assert files == {"c.yaml"} and load_cluster(tmp_path / "c.yaml").num_nodes == 2
        # It may have ended by itself.
        assert status in (0, 130)
        return
    assert (status, files) == (130, set()), lines
    said = [line for line in lines if not EXPECTED.match(line)]
    assert len(said) == 1 and said[0].startswith(f"monta {command}: interrupted"), said
