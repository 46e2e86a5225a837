"""The chain of MoNTA on two emulated nodes: its AllGather runs under its AllToAll."""

import os
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path

import pytest

from monta_megatron.emulation import emulator
from monta_megatron.tools.trace import Timeline, Trace, Track

LIMIT_S = 240
NAMESPACES = Path("/run/netns")
# At 200 Mbit/s the AllToAll of a pass takes 160 ms; an AllGather takes 10, through memory.
COMMAND = (
    "emulate --nodes 2 --ranks-per-node 2 --inter-mbit 200 -- -m monta_megatron bench "
    "--experts 8 --top-k 2 --hidden 1024 --tokens 512 --tp 2 --repeats 1 "
    "--phase forward --stock alltoall --chains alltoall_allgather --num-chunks 1,4 --trace"
)
# At most about 0.75 is expected: of four AllGathers one has no AllToAll to run under.
LEAST_HIDDEN = 0.6


def hidden_share(timeline: Timeline) -> float:
    """Share of the time of all AllGathers in which an AllToAll of the same rank ran."""
    times = map(gathered_and_hidden_us, timeline.tracks)
    gathered_us, hidden_us = map(sum, zip(*times, strict=True))
    return hidden_us / gathered_us


def gathered_and_hidden_us(track: Track) -> tuple[float, float]:
    """Time of a rank's AllGathers, and the part of it in which an AllToAll ran."""
    gathers, alltoalls = (
        [span for span in track.spans if span.stage == stage] for stage in ("allgather", "alltoall")
    )
    gathered_us = hidden_us = 0.0
    # Between two neighbouring ends nothing changes.
    ends_us = sorted(set(chain(*((span.start_us, span.end_us) for span in track.spans))))
    for start_us, end_us in pairwise(ends_us):
        runs = [
            any(span.start_us <= start_us and end_us <= span.end_us for span in spans)
            for spans in (gathers, alltoalls)
        ]
        gathered_us += (end_us - start_us) * runs[0]
        hidden_us += (end_us - start_us) * all(runs)
    return gathered_us, hidden_us


@pytest.mark.timeout(LIMIT_S + 30)
def test_the_allgather_runs_under_the_alltoall(tmp_path: Path) -> None:
    try:
        emulator.unshare_command()
    except ValueError as error:
        pytest.skip(f"monta emulate: {error}")
    if os.geteuid() != 0 and not NAMESPACES.exists():
        pytest.skip(f"monta emulate: {NAMESPACES} has to exist for who is not root")
    path = tmp_path / "trace.json"
    command = [sys.executable, "-m", "monta_megatron", *COMMAND.split(), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    rows = {row.name: row for row in Trace.load(path).timelines}
    assert len(rows) == 3
    assert hidden_share(rows["alltoall_allgather in 1 chunk"]) == 0
    assert hidden_share(rows["alltoall_allgather in 4 chunks"]) >= LEAST_HIDDEN
