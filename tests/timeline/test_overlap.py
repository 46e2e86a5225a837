"""The chain of MoNTA on two emulated nodes: its AllGather runs under its AllToAll."""

import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import skip_without_namespaces

from monta_megatron.tools.timeline import overlap_of
from monta_megatron.tools.trace import Trace

LIMIT_S = 240
# At 200 Mbit/s the AllToAll of a pass takes 160 ms; an AllGather takes 10, through memory.
COMMAND = (
    "emulate --nodes 2 --ranks-per-node 2 --inter-mbit 200 -- -m monta_megatron bench "
    "--experts 8 --top-k 2 --hidden 1024 --tokens 512 --tp 2 --repeats 1 "
    "--phase forward --stock alltoall --chains alltoall_allgather --num-chunks 1,4 --trace"
)
# At most about 0.75 is expected: of four AllGathers one has no AllToAll to run under.
LEAST_HIDDEN = 0.6


@pytest.mark.timeout(LIMIT_S + 30)
def test_the_allgather_runs_under_the_alltoall(tmp_path: Path) -> None:
    skip_without_namespaces()
    path = tmp_path / "trace.json"
    command = [sys.executable, "-m", "monta_megatron", *COMMAND.split(), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    hidden = {}
    for name, row in Trace.load(path).rows.items():
        # The network's AllToAll and the node link's AllGather, without copies.
        spans = [span for span in row if span.stage in ("alltoall", "allgather")]
        hidden[name] = overlap_of(spans)["hidden_share"]["intra"]
    assert len(hidden) == 3
    assert hidden["alltoall_allgather in 1 chunk"] == 0
    assert hidden["alltoall_allgather in 4 chunks"] >= LEAST_HIDDEN
