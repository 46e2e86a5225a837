"""Spans, overlap, trace and picture: by hand, and against the cost model's own schedule."""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from commands import Monta
from linear_pipeline import Stage, operation_of, work_of

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import with_waits
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import ParallelLayout, shape_of_layout
from monta_megatron.planner.model import load_model
from monta_megatron.planner.price import price
from monta_megatron.tools.timeline.report import of_trace, overlap_of, predict
from monta_megatron.tools.trace import STOCK, Span, Timeline, Trace, Track, lanes_of

MODEL, CLUSTER = "qwen3_235b_a22b", "h100_8x_ndr"
FLAGS = [
    *("--model", MODEL, "--cluster", CLUSTER),
    *("--world-size", "128", "--tp", "2", "--ep", "16", "--pp", "4"),
]


def span(resource: Any, start_us: float, end_us: float, chunk: int = 0) -> Span:
    return Span("dispatch", "stage", chunk, 0, resource, start_us, end_us)


def timeline(name: str, *ranks: Sequence[Span]) -> Timeline:
    tracks = []
    for number, spans in enumerate(ranks):
        passes = {"dispatch": (spans[0].start_us, spans[-1].end_us)}
        tracks.append(Track(f"rank {number}", passes, tuple(spans)))
    return Timeline(name, tuple(tracks))


def test_predicted_spans_are_those_of_the_schedule() -> None:
    model, cluster = load_model(MODEL), load_cluster(CLUSTER)
    shape = shape_of_layout(model, ParallelLayout(world_size=16, ep=16), 8, 4096)
    chain = CHAINS["hierarchical_alltoall"]
    found, predicted = price(shape, cluster, chain, 4), predict(shape, cluster, chain, 4)
    (track,) = predicted.tracks
    ran = [span for span in track.spans if span.resource != "host"]
    assert list(map(tuple, ran)) == [
        (work.pass_name, work.stage, task.chunk, task.operation, work.resource, *times[1:])
        for task, times in zip(found.tasks, found.times, strict=True)
        if (work := found.works[task.work]).resource != "host"
    ]
    assert predicted.total_us == pytest.approx(found.total_us)
    # The host launches one operation at a time, each before it starts.
    launches = [span for span in track.spans if span.resource == "host"]
    assert len(lanes_of(launches)) == 1
    launched = {span[:4]: span.end_us for span in launches}
    assert all(launched.get(span[:4], 0) <= span.start_us + 1e-6 for span in ran)


# What happens, to which operation, and when.
STEPS = (
    ("begin", 0, 0.0),
    ("end", 0, 2.0),
    ("begin", 1, 2.0),
    ("start", 1, 2.5),
    ("end", 1, 3.0),
    ("begin", 2, 3.0),
    ("wait", 1, 3.1),
    ("ready", 1, 9.0),
    ("end", 2, 10.0),
)


def test_spans_of_a_collective_and_the_copies_around_it() -> None:
    record = pytest.importorskip(
        "monta_megatron.tools.record", reason="needs torch and megatron-core"
    )
    stages = [
        Stage(work_of(name, resource, (0.0,)), 0)
        for name, resource in (("copy", "memory"), ("alltoall", "inter"), ("order", "memory"))
    ]
    plain = [operation_of(number, number, 0, stages) for number in range(3)]
    operations = with_waits(plain, [[], [0], [1]], "host")
    # It was through at 8, and noticed at 9.
    ends_us = {("dispatch", 1): 8.0}
    steps = [record.TimedStep(how, "dispatch", operations[at], us, us) for how, at, us in STEPS]

    def spans(is_device: bool) -> list[tuple[Any, ...]]:
        found = record.spans_of(steps, ends_us, is_device)
        return [(span.stage, span.resource, span.start_us, span.end_us) for span in found]

    ran = [
        ("copy", "memory", 0.0, 2.0),
        ("alltoall", "inter", 2.5, 8.0),
        ("order", "memory", 9.0, 10.0),
    ]
    assert spans(is_device=False) == ran
    # What a device runs, the host launches.
    assert spans(is_device=True) == [
        *(ran[0], ("copy", "host", 0.0, 2.0)),
        *(ran[1], ("alltoall", "host", 2.0, 3.0)),
        *(ran[2], ("order", "host", 3.0, 10.0)),
    ]


def test_overlap_by_hand() -> None:
    # Network 0 to 10, node link 4 to 6 and 5 to 12, memory 20 to 24; the host launches meanwhile.
    busy = [
        span("inter", 0, 10),
        span("intra", 4, 6),
        span("intra", 5, 12, chunk=1),
        span("host", 0, 13),
        span("memory", 20, 24),
    ]
    found = overlap_of(timeline("a chain", busy, [span("inter", 0, 10)]))
    assert found.total_us == 24
    # Means of two ranks.
    assert found.busy_us == {"inter": 10, "intra": 4, "memory": 2}
    assert found.hidden_share == {"inter": 6 / 20, "intra": 6 / 8, "memory": 0}
    idle = overlap_of(timeline("a chain", [span("inter", 0, 10)]))
    assert idle.hidden_share == {"inter": 0, "intra": None, "memory": None}


def test_spans_that_overlap_on_one_resource_get_more_lanes() -> None:
    spans = [span("inter", 0, 4), span("inter", 2, 6), span("inter", 4, 5), span("inter", 6, 7)]
    assert [[(span.start_us, span.end_us) for span in lane] for lane in lanes_of(spans)] == [
        [(0, 4), (4, 5), (6, 7)],
        [(2, 6)],
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A trace of stock alltoall and two chains on two ranks."""
    slow, fast = ([span("inter", 40, end), span("intra", 50, end)] for end in (90, 70))
    rows = (
        timeline(STOCK, *2 * [[span("inter", 10, 30), span("memory", 30, 40)]]),
        timeline("hierarchical_alltoall in 4 chunks", slow, fast),
        timeline("alltoall_dedup in 1 chunk", fast, fast).shifted(60),
    )
    path = tmp_path / "trace.json"
    Trace(title="recorded: here", timelines=rows, about={"clock": "this"}).save(path)
    return path


def test_a_trace_has_a_process_per_rank_and_a_thread_per_resource(path: Path) -> None:
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    names: dict[tuple[str, int, int], Any] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
        else:
            key = event["name"], event["pid"], event["tid"]
            assert event["ph"] == "M" and key not in names
            names[key] = event["args"]
    processes = {
        at: args["name"] for (kind, at, _), args in names.items() if kind == "process_name"
    }
    assert processes == {1000: "rank 0", 2000: "rank 1"}
    threads = {names["thread_name", 1000, at]["name"] for process, at in slices if process == 1000}
    assert threads == {"passes", "network", "node link", "memory"}
    for (process, thread), events in slices.items():
        # Perfetto takes the two for the main thread, and drops what overlaps on one.
        assert thread not in (0, process)
        assert names["thread_sort_index", process, thread]["sort_index"] == thread
        events.sort(key=lambda event: event["ts"])
        for event, following in pairwise(events):
            assert event["ts"] + event["dur"] < following["ts"]


def test_the_command_draws_the_fastest_of_a_trace(path: Path, monta: Monta) -> None:
    document = monta.document("timeline", path)
    assert document["drawn"] == [STOCK, "alltoall_dedup in 1 chunk"]
    assert document["ratio_to_alltoall"] == pytest.approx(1, abs=0.01)
    hidden = [row["hidden_share"] for row in document["rows"]]
    assert hidden[0] == {"inter": 0, "intra": None, "memory": 0}
    # Of two ranks: 40 us of 50 and 20 of 30.
    assert hidden[1]["inter"] == pytest.approx(60 / 80, abs=0.01)
    picture = path.with_suffix(".png")
    assert document["picture"] == str(picture) and picture.read_bytes().startswith(b"\x89PNG")
    _, printed, _ = monta("timeline", path, "--chain", "hierarchical_alltoall")
    assert printed.startswith("hierarchical_alltoall in 4 chunks is 0.60x as fast as stock")
    with pytest.raises(ValueError, match="got alltoall_dedup in 4 chunks, must be one of"):
        of_trace(path, (CHAINS["alltoall_dedup"], 4))


def test_the_command_draws_what_the_planner_picks(tmp_path: Path, monta: Monta) -> None:
    picture = tmp_path / "new" / "timeline.png"
    document = monta.document("timeline", *FLAGS, "--out", picture)
    plan = monta.document("plan", *FLAGS)
    assert document["drawn"] == [STOCK, f"{plan['chain']} in {plan['num_chunks']} chunks"]
    totals_us = [row["total_us"] for row in document["rows"]]
    assert totals_us == pytest.approx([plan["stock_us"], plan["predicted_us"]])
    assert document["ratio_to_alltoall"] == pytest.approx(totals_us[0] / totals_us[1])
    assert picture.read_bytes().startswith(b"\x89PNG")
    # Stock is compared with nothing.
    document = monta.document("timeline", *FLAGS, "--chain", "alltoall", "--out", picture)
    assert (document["drawn"], document["ratio_to_alltoall"]) == (["alltoall in 1 chunk"], None)


def test_a_file_that_is_no_trace_is_one_line(path: Path, monta: Monta) -> None:
    text = path.read_text()
    for wrong in ("[]", '{"traceEvents": []}', text[:-40], text.replace('"resource"', '"source"')):
        path.write_text(wrong)
        line = monta.refusal("timeline", path)
        assert line.startswith(f"monta timeline: {path}: is no trace"), line
    line = monta.refusal("timeline", path.with_name("nowhere"))
    assert "cannot be read: No such file" in line
