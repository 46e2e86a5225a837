"""`monta timeline --record`: one run of 4 CPU ranks, its recording, and what is drawn from it."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import LIMIT_S, ForkedRanks

from monta_megatron.cli import main
from monta_megatron.exchange.recording import Span
from monta_megatron.tools.timeline.recording import Recording

CLUSTER = Path(__file__).parents[2] / "configs/clusters/a800_2x8_ib200.yaml"
NUM_CHUNKS, NUM_RANKS = 3, 4
LAYER = (
    "--chain alltoall_allgather --num-chunks 3 --tp 2 --experts 8 --top-k 2 --hidden 32 "
    "--tokens 96 --ranks-per-node 2 --repeats 3 --warmup 1"
)
# First and second collective of each pass.
COLLECTIVES = {
    "dispatch": ("alltoall", "allgather"),
    "combine": ("allgather", "alltoall"),
    "combine_backward": ("alltoall", "allgather"),
    "dispatch_backward": ("allgather", "alltoall"),
}
pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    ranks = ForkedRanks("monta_megatron.tools.timeline.record")
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def folder(ranks: ForkedRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the run has left."""
    folder = tmp_path_factory.mktemp("recorded")
    script = str(Path(__file__).with_name("record_in_profile.py"))
    result = ranks.run(script, "--record", str(folder), *LAYER.split(), "--json")
    assert result.returncode == 0, result.stderr
    # Nothing else on standard output.
    (folder / "stdout.json").write_text(json.dumps(json.loads(result.stdout)))
    return folder


@pytest.fixture(scope="module")
def recording(folder: Path) -> Recording:
    return Recording.load(folder / "alltoall_allgather_x3.json")


def spans_of_pass(
    spans: tuple[Span, ...], pass_name: str, action: str = "run"
) -> dict[tuple[str, int], Span]:
    """What ran in a pass, or was waited for, by stage and chunk."""
    return {
        (span.stage, span.chunk): span
        for span in spans
        if span.pass_name == pass_name and span.action == action and span.chunk is not None
    }


def test_every_stage_and_chunk_of_every_pass_is_there(recording: Recording) -> None:
    assert len(recording.ranks) == NUM_RANKS
    assert [record.node for record in recording.ranks] == [0, 0, 1, 1]
    for record in recording.ranks:
        assert {span.pass_name for span in record.spans} == set(COLLECTIVES)
        assert all(span.start_us <= span.end_us for span in record.spans)
        for pass_name, collectives in COLLECTIVES.items():
            ran = spans_of_pass(record.spans, pass_name)
            for stage in (*collectives, "pack", "order"):
                assert {chunk for name, chunk in ran if name == stage} == set(range(NUM_CHUNKS))
            resources = {stage: span.resource for (stage, _), span in ran.items()}
            assert (resources["alltoall"], resources["allgather"]) == ("inter", "intra")
            assert resources["pack"] == resources["order"] == "memory"
    # On one clock, from the first span on.
    assert recording.clock == "the monotonic clock of one host"
    assert min(span.start_us for record in recording.ranks for span in record.spans) == 0


def test_collectives_of_neighbouring_chunks_overlap(recording: Recording) -> None:
    # These are over in a moment, so what tells is when the host waits for them.
    for record in recording.ranks:
        for pass_name, (first, second) in COLLECTIVES.items():
            ran = spans_of_pass(record.spans, pass_name)
            waited = spans_of_pass(record.spans, pass_name, action="wait")
            # Transposed passes take the chunks from the last to the first.
            chunks = sorted(range(NUM_CHUNKS), key=lambda chunk: ran[first, chunk].start_us)
            for chunk, following in pairwise(chunks):
                assert ran[first, following].start_us < waited[second, chunk].start_us
                assert ran[first, chunk].end_us <= ran[second, chunk].start_us


def test_all_ranks_are_in_the_pass_at_the_same_time(recording: Recording) -> None:
    # An exchange ends on no rank before it has begun on all: clocks that differ would show.
    for pass_name, (first, second) in COLLECTIVES.items():
        spans = [spans_of_pass(record.spans, pass_name) for record in recording.ranks]
        starts = [min(ran[first, chunk].start_us for chunk in range(NUM_CHUNKS)) for ran in spans]
        ends = [max(ran[second, chunk].end_us for chunk in range(NUM_CHUNKS)) for ran in spans]
        assert max(starts) < min(ends)


def test_ranks_of_several_hosts_are_put_on_the_first_ones_clock(
    ranks: ForkedRanks, tmp_path: Path
) -> None:
    script = str(Path(__file__).with_name("record_with_other_clocks.py"))
    layer = LAYER.replace("--tp 2", "--tp 2 --phase forward")
    result = ranks.run(script, "--record", str(tmp_path), *layer.split())
    assert result.returncode == 0, result.stderr
    recording = Recording.load(tmp_path / "alltoall_allgather_x3.json")
    assert recording.clock == "monotonic clocks compared after 31 barriers"
    # The clocks are 1,000 s apart, and a run is ended long before it takes half of that.
    assert LIMIT_S < 500
    assert 0 < recording.clock_error_us < 500e6
    spans = [span for record in recording.ranks for span in record.spans]
    assert min(span.start_us for span in spans) == 0
    assert max(span.end_us for span in spans) < 500e6


def test_a_profile_has_a_range_for_every_stage_and_chunk(folder: Path) -> None:
    for rank in range(NUM_RANKS):
        names = set(json.loads((folder / f"ranges_{rank}").read_text()))
        for pass_name in COLLECTIVES:
            for stage in ("pack", "alltoall", "allgather", "order"):
                for chunk in range(NUM_CHUNKS):
                    assert f"monta {pass_name}: alltoall_allgather, {stage}, chunk {chunk}" in names


def test_the_run_itself_draws_and_tells(folder: Path) -> None:
    document = json.loads((folder / "stdout.json").read_text())
    assert "recorded on 4 CPU ranks of 2 nodes" in document["title"]
    # Stock's chain ran in turn with it, and is drawn above it.
    names = ("alltoall in 1 chunk", "alltoall_allgather in 3 chunks")
    passes = [(name, of) for name in names for of in (*COLLECTIVES, "all")]
    assert [(row["name"], row["pass_name"]) for row in document["overlaps"]] == passes
    assert document["ratio_to_alltoall"] > 0
    for row in document["overlaps"]:
        assert row["source"] == "recorded" and row["total_us"] > 0
        assert all(0 <= share <= 1 + 1e-9 for share in row["hidden_share"].values())
        assert all(
            row["busy_us"][resource] > 0 for resource in ("inter", "intra", "memory", "host")
        )
    assert set(document["files"]) == {"recording", "of stock", "trace", "picture"}
    assert Path(document["files"]["picture"]).read_bytes().startswith(b"\x89PNG")


def test_recorded_and_predicted_side_by_side(folder: Path, tmp_path: Path) -> None:
    recording = folder / "alltoall_allgather_x3.json"
    arguments = ["timeline", str(recording), "--cluster", str(CLUSTER), "--out", str(tmp_path)]
    assert main([*arguments, "--max-ranks", "1"]) == 0
    trace: dict[str, Any] = json.loads((tmp_path / "alltoall_allgather_x3.trace.json").read_text())
    names = {
        event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"
    }
    assert names == {
        f"alltoall_allgather in 3 chunks: {name}"
        for name in (
            "busiest rank, predicted",
            *(f"rank {rank} (node {rank // 2})" for rank in range(NUM_RANKS)),
        )
    }


def test_below_stock_of_another_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, stock = (
        str(folder / f"{name}.json") for name in ("alltoall_allgather_x3", "alltoall_x1")
    )
    arguments = ["timeline", ours, "--stock", stock, "--out", str(tmp_path), "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["ratio_to_alltoall"] > 0
    for given, said in (
        (["--cluster", "h100_8x_ndr"], "--cluster: got H100, 8x InfiniBand NDR, must be left out"),
        (["--stock", ours], f"--stock: {ours}: chain: got alltoall_allgather, must be alltoall"),
    ):
        assert main([*arguments, *given]) == 2
        assert capsys.readouterr().err.startswith(f"monta timeline: {said}")


def edited(recording: Path, target: Path, **changes: Any) -> Path:
    target.write_text(json.dumps({**json.loads(recording.read_text()), **changes}))
    return target


def test_a_recording_that_is_none_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = folder / "alltoall_allgather_x3.json"
    half, foreign, binary = tmp_path / "half.json", tmp_path / "foreign.json", tmp_path / "binary"
    half.write_text(good.read_text()[:-40])
    foreign.write_text('{"traceEvents": []}')
    binary.write_bytes(b"\x89PNG\xff\x00")
    span = json.loads(good.read_text())["ranks"][0]["spans"][0]
    for path, words in (
        (tmp_path / "nowhere.json", "cannot be read: No such file or directory"),
        (half, "is no whole JSON file"),
        (binary, "is no whole JSON file"),
        (foreign, "format: got None, must be 'monta timeline 1'"),
        (edited(good, tmp_path / "chain.json", chain="fastest"), "chain: got 'fastest', must be"),
        (edited(good, tmp_path / "serial.json", chain="alltoall"), "num_chunks: got 3, must be 1"),
        (
            edited(
                good, tmp_path / "s.json", ranks=[{"node": 0, "spans": [{**span, "resource": 3}]}]
            ),
            "ranks[0].spans[0].resource: got 3, must be one of",
        ),
    ):
        assert main(["timeline", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"monta timeline: {path}: ") and words in line
