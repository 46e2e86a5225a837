"""What one rank of 16 receives, replayed in one process: the same bits, and faults are found."""

from unittest import mock

import pytest
import replay
import torch
from preloaded import Preloaded
from replay import FAULTS, Recorded, Replay
from stream_recorder import Recorder

CASES = {str(case): case for case in replay.replay_cases()}
# Every stage waits for something, and windows are used again.
FAULTY_CASES = [
    "alltoall_allgather x4, EP 8 x ETP 2",
    "hierarchical_allgather x4, EP 16 x ETP 1",
    "hierarchical_alltoall x4, EP 16 x ETP 1",
]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    path = tmp_path_factory.mktemp("replay") / "record.pt"
    process = Preloaded("replay", limit_s=replay.LIMIT_S, OMP_NUM_THREADS="1")
    try:
        # In a process of its own, without threads or groups.
        result = process.run("replay:record", list(CASES.values()), path)
    finally:
        process.close()
    assert result.returncode == 0, result.stderr
    assert path.stat().st_size < 16e6
    return dict(zip(CASES, replay.read_records(path), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_replay_gives_the_recorded_bits(records: dict[str, Recorded], name: str) -> None:
    """With streams, whose accesses are all in order."""
    lines, findings = _under_recorder(records[name], name)
    assert lines == findings == []


def _under_recorder(
    recorded: Recorded, name: str, fault: str | None = None
) -> tuple[list[str], list[str]]:
    """The differences of a replay with streams, and what the recorder found."""
    recorder = Recorder()
    replayed = Replay(CASES[name], recorded, monitor=recorder.monitor)
    with recorder, mock.patch.object(torch.cuda, "_sleep"), FAULTS[fault]():
        replayed.run()
    return replayed.differences(), [finding.text for finding in recorder.findings]


@pytest.mark.parametrize("name", FAULTY_CASES)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault is not None])
def test_a_planted_fault_is_found(records: dict[str, Recorded], name: str, fault: str) -> None:
    assert any(_under_recorder(records[name], name, fault))
