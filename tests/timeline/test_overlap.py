"""The chain of MoNTA on two emulated nodes: its AllGather runs under its AllToAll."""

import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import skip_without_namespaces

from monta_megatron.tools.timeline.report import overlap_of
from monta_megatron.tools.trace import Timeline, Trace

LIMIT_S = 240
# At 200 Mbit/s the AllToAll of a pass takes 160 ms; an AllGather takes 10, through memory.
COMMAND = (
    "emulate --nodes 2 --ranks-per-node 2 --inter-mbit 200 -- -m monta_megatron bench "
    "--experts 8 --top-k 2 --hidden 1024 --tokens 512 --tp 2 --repeats 1 "
    "--phase forward --stock alltoall --chains alltoall_allgather --num-chunks 1,4 --trace"
)
# At most about 0.75 is expected: of four AllGathers one has no AllToAll to run under.
LEAST_HIDDEN = 0.6


def hidden_share(timeline: Timeline) -> float | None:
    """Share of the time of all AllGathers in which an AllToAll of the same rank ran."""
    tracks = (
        track._replace(
            spans=tuple(span for span in track.spans if span.stage in ("allgather", "alltoall"))
        )
        for track in timeline.tracks
    )
    return overlap_of(timeline._replace(tracks=tuple(tracks))).hidden_share["intra"]


@pytest.mark.timeout(LIMIT_S + 30)
def test_the_allgather_runs_under_the_alltoall(tmp_path: Path) -> None:
    skip_without_namespaces()
    path = tmp_path / "trace.json"
    command = [sys.executable, "-m", "monta_megatron", *COMMAND.split(), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    rows = {row.name: row for row in Trace.load(path).timelines}
    assert len(rows) == 3
    assert hidden_share(rows["alltoall_allgather in 1 chunk"]) == 0
    share = hidden_share(rows["alltoall_allgather in 4 chunks"])
    assert share is not None and share >= LEAST_HIDDEN
