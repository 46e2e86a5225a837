"""What the ranks of a training have recorded: read, checked, drawn."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from monta_megatron.cli import main
from monta_megatron.exchange.recording import RankRecording, RecordedPass, Span
from monta_megatron.tools.timeline.recording import load_training, median_timeline, whole_timeline

PASSES = ("dispatch", "combine", "combine_backward", "dispatch_backward")


def ran(pass_name: str, start_us: float, end_us: float) -> Span:
    return Span(
        pass_name=pass_name,
        stage="alltoall",
        chunk=0,
        resource="inter",
        action="run",
        start_us=start_us,
        end_us=end_us,
        operation=0,
    )


def save_ranks(folder: Path, chain: str, num_chunks: int, times_us: Iterable[float]) -> Path:
    """Two ranks of two nodes; each run of a pass takes one of these times, from 1,000 us on."""
    folder.mkdir()
    for rank in range(2):
        passes, now_us = [], 1000.0
        for turn, time_us in enumerate(times_us):
            for name in PASSES:
                # The second rank comes 1 us later.
                spans = (ran(name, now_us + rank, now_us + time_us),)
                passes.append(RecordedPass(turn=turn, spans=spans))
                now_us += time_us
        recording = RankRecording(
            iteration=10,
            rank=rank,
            exchange=(0, 1),
            nodes=(0, 1),
            chain=chain,
            num_chunks=num_chunks,
            tp=1,
            ep=2,
            etp=1,
            num_experts=4,
            topk=2,
            hidden_size=32,
            tokens=64,
            dtype="float32",
            device="CPU ranks",
            inter_mbit=500,
            clock="the monotonic clock of one host",
            clock_error_us=0,
            versions={"torch": None},
            passes=tuple(passes),
        )
        recording.save(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "monta", "hierarchical_alltoall", 4, (90, 20, 30))


def test_every_pass_is_drawn_at_its_median_time(folder: Path) -> None:
    ranks = load_training(folder)
    timeline = median_timeline(ranks)
    assert [track.name for track in timeline.tracks] == ["rank 0 (node 0)", "rank 1 (node 1)"]
    for track, late_us in zip(timeline.tracks, (0, 1), strict=True):
        assert [(span.pass_name, span.start_us, span.end_us) for span in track.spans] == [
            (name, 30 * number + late_us, 30 * (number + 1)) for number, name in enumerate(PASSES)
        ]
    assert [len(track.spans) for track in whole_timeline(ranks).tracks] == [12, 12]


def test_below_a_training_with_stock_alltoall(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = save_ranks(tmp_path / "stock", "alltoall", 1, (75,))
    arguments = ["timeline", str(folder), "--stock", str(stock), "--out", str(tmp_path), "--json"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ratio_to_alltoall"] == pytest.approx(75 / 30)
    assert "recorded in iteration 10 of a training: an exchange of 2 CPU ranks" in document["title"]
    assert Path(document["files"]["picture"]).read_bytes().startswith(b"\x89PNG")
    trace = json.loads(Path(document["files"]["trace"]).read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    # All micro-batches of both ranks, of both trainings.
    assert len(slices) == 2 * (12 + 4)


def test_files_that_do_not_belong_together_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    other = save_ranks(tmp_path / "other", "hierarchical_alltoall", 4, (10,))
    document = json.loads((other / "rank_00001.json").read_text())
    (other / "rank_00001.json").write_text(json.dumps({**document, "iteration": 3}))
    lost = save_ranks(tmp_path / "lost", "hierarchical_alltoall", 4, (10,))
    (lost / "rank_00001.json").unlink()
    nothing = save_ranks(tmp_path / "nothing", "hierarchical_alltoall", 4, (10,))
    document["passes"][0]["spans"] = []
    (nothing / "rank_00001.json").write_text(json.dumps(document))
    recording = tmp_path / "file.json"
    recording.write_text("{}")
    for arguments, words in (
        ([str(empty)], f"{empty}: holds no rank_*.json, must be of a training"),
        ([str(other)], "rank_00001.json: iteration: got 3, must be 10 as in rank_00000.json"),
        ([str(lost)], "rank_00001.json: cannot be read: No such file"),
        ([str(nothing)], "passes[0].spans: got none, must be at least one"),
        ([str(folder), "--stock", str(folder)], "chain: got hierarchical_alltoall, must be allto"),
        ([str(folder), "--cluster", "h100_8x_ndr"], "--cluster: got H100, 8x InfiniBand NDR, must"),
        ([str(recording), "--stock", str(folder)], "file.json: format: got None, must be"),
    ):
        assert main(["timeline", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("monta timeline: ") and words in line, line
