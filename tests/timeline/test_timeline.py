"""Spans, overlap, trace and picture, by hand."""

import json
from pathlib import Path
from typing import Any

import golden
import pytest
from commands import Monta

from monta_megatron.tools import pictures
from monta_megatron.tools.timeline import overlap_of
from monta_megatron.tools.trace import STOCK, Span, Trace, lanes_of


def span(
    resource: Any, start_us: float, end_us: float, chunk: int = 0, rank: int = 0, row: str = "ours"
) -> Span:
    stage = "" if resource == "pass" else "stage"
    return Span(row, rank, "dispatch", stage, chunk, 0, resource, start_us, end_us)


def test_overlap_by_hand() -> None:
    # Network 0 to 10, node link 4 to 6 and 5 to 12, memory 20 to 24; the host launches meanwhile.
    busy = [
        span("inter", 0, 10),
        span("intra", 4, 6),
        span("intra", 5, 12, chunk=1),
        span("host", 0, 13),
        span("memory", 20, 24),
        span("pass", 0, 24),
    ]
    found = overlap_of([*busy, span("inter", 0, 10, rank=1)])
    # Means of two ranks.
    assert found == {
        "total_us": 24,
        "busy_us": {"inter": 10, "intra": 4, "memory": 2},
        "hidden_share": {"inter": 6 / 20, "intra": 6 / 8, "memory": 0},
    }
    idle = overlap_of([span("inter", 0, 10)])
    assert idle["hidden_share"] == {"inter": 0, "intra": None, "memory": None}


def test_spans_that_overlap_on_one_resource_get_more_lanes() -> None:
    spans = [span("inter", 0, 4), span("inter", 2, 6), span("inter", 4, 5), span("inter", 6, 7)]
    lanes = lanes_of([span("host", 0, 9), *spans, span("pass", 0, 9)])
    assert [[(span.start_us, span.end_us) for span in lane] for lane in lanes] == [
        [(0, 9)],
        [(0, 4), (4, 5), (6, 7)],
        [(2, 6)],
        [(0, 9)],
    ]
    assert [lane[0].resource for lane in lanes] == ["pass", "inter", "inter", "host"]


HIERARCHICAL, DEDUP = "hierarchical_alltoall in 4 chunks", "alltoall_dedup in 1 chunk"
ROWS: list[tuple[str, str, float, float]] = [
    (STOCK, "pass", 10, 40),
    (STOCK, "inter", 10, 30),
    (STOCK, "memory", 30, 40),
    (HIERARCHICAL, "pass", 40, 90),
    (HIERARCHICAL, "inter", 40, 90),
    (HIERARCHICAL, "intra", 50, 90),
    (DEDUP, "pass", 100, 130),
    (DEDUP, "inter", 100, 130),
]


def spans_from(begin_us: float) -> tuple[Span, ...]:
    """`ROWS` on two ranks, in times since a moment."""
    return tuple(
        span(resource, start_us - begin_us, end_us - begin_us, rank=rank, row=row)
        for rank in range(2)
        for row, resource, start_us, end_us in ROWS
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A trace of stock alltoall and two chains."""
    path, names = tmp_path / "trace.json", ("rank 0", "rank 1")
    about = {"clock": "this"}
    Trace(title="recorded: here", ranks=names, spans=spans_from(0), about=about).save(path)
    return path


def test_a_trace_is_read_as_it_was_written(path: Path) -> None:
    trace = Trace.load(path)
    assert (trace.title, trace.ranks) == ("recorded: here", ("rank 0", "rank 1"))
    assert trace.about == {"clock": "this"}
    assert list(trace.rows) == [STOCK, HIERARCHICAL, DEDUP]
    # Its times begin at 0.
    assert sorted(trace.spans) == sorted(spans_from(10))


def test_a_trace_has_a_process_per_rank_and_a_thread_per_resource(path: Path) -> None:
    """Perfetto takes thread 0, and one with its process's number, for the main thread.

    Of slices that touch on a thread it drops one.
    """
    events = json.loads(path.read_text())["traceEvents"]
    lines = "".join(f"{json.dumps(event)}\n" for event in events)
    golden.check(Path(__file__).with_name("trace_events.txt"), lines)


def test_the_command_draws_the_fastest_of_a_trace(path: Path, monta: Monta) -> None:
    document = monta.document("timeline", path)
    assert document["drawn"] == [STOCK, DEDUP]
    hidden = [row["hidden_share"] for row in document["rows"]]
    assert hidden[0] == {"inter": 0, "intra": None, "memory": 0}
    assert hidden[1] == {"inter": 40 / 50, "intra": 1, "memory": None}
    picture = path.with_suffix(".png")
    assert document["picture"] == str(picture) and picture.read_bytes().startswith(b"\x89PNG")
    status, printed, _ = monta("timeline", path, "--chain", "hierarchical_alltoall")
    assert status == 0
    assert printed.startswith(f"recorded once: {STOCK} 30 us, {HIERARCHICAL} 50 us")
    line = monta.refusal("timeline", path, "--chain", "alltoall")
    assert f"--chain: got alltoall, must have a row in {path}: {HIERARCHICAL}, {DEDUP}" in line


def test_without_matplotlib_the_table_is_printed_and_a_line_says_why(
    path: Path, monkeypatch: pytest.MonkeyPatch, monta: Monta
) -> None:
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    status, printed, said = monta("timeline", path, "--json")
    assert status == 0 and json.loads(printed)["picture"] is None
    assert "no picture without matplotlib: pip install matplotlib" in said


def test_a_file_that_is_no_trace_is_one_line(path: Path, monta: Monta) -> None:
    text = path.read_text()
    for wrong in ("[]", '{"traceEvents": []}', text[:-40], text.replace('"resource"', '"source"')):
        path.write_text(wrong)
        line = monta.refusal("timeline", path)
        assert line.startswith(f"monta timeline: {path}: is no trace"), line
    assert "cannot be read: No such file" in monta.refusal("timeline", path.with_name("nowhere"))
