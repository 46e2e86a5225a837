"""Spans, overlap, trace and picture: by hand, and against the cost model's own schedule."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from linear_pipeline import Stage, operation_of, work_of

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import Operation, Policy, with_waits
from monta_megatron.cli import main
from monta_megatron.common import strict_yaml
from monta_megatron.core import Shape
from monta_megatron.exchange.recording import Span, TimedStep, spans_of
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout, exchanges, shape_of_model
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.price import price
from monta_megatron.tools.timeline.drawing import chrome_trace
from monta_megatron.tools.timeline.picture import Comparison, end_to_end
from monta_megatron.tools.timeline.predicted import predict
from monta_megatron.tools.timeline.spans import Timeline, Track, overlaps, rows_of

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = CONFIGS / "models/qwen3_235b_a22b.yaml"
CLUSTER = CONFIGS / "clusters/h100_8x_ndr.yaml"
FLAGS = [
    *("--model", str(MODEL), "--cluster", str(CLUSTER)),
    *("--world-size", "128", "--tp", "2", "--ep", "16", "--pp", "4"),
]


@pytest.fixture(scope="module")
def shape() -> Shape:
    model = load_model(MODEL)
    (layout,) = exchanges(ParallelLayout(world_size=16, ep=16), model.num_experts, 8)
    return shape_of_model(model, layout, 4096)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return strict_yaml.load(Cluster, CLUSTER)


@pytest.fixture(scope="module")
def predicted(shape: Shape, cluster: Cluster) -> Timeline:
    return predict(shape, cluster, CHAINS["hierarchical_alltoall"], 4, "forward_backward")


def span(
    resource: Any, start_us: float, end_us: float, action: Any = "run", chunk: int = 0
) -> Span:
    return Span(
        pass_name="dispatch",
        stage="stage",
        chunk=chunk,
        resource=resource,
        action=action,
        start_us=start_us,
        end_us=end_us,
    )


def test_predicted_spans_are_those_of_the_schedule(
    shape: Shape, cluster: Cluster, predicted: Timeline
) -> None:
    found = price(shape, cluster, CHAINS["hierarchical_alltoall"], 4)
    (track,) = predicted.tracks
    ran = {
        (span.pass_name, span.stage, span.operation): span
        for span in track.spans
        if span.action == "run"
    }
    for task, times in zip(found.tasks, found.times, strict=True):
        work = found.works[task.work]
        drawn = ran.pop((work.pass_name, work.stage, task.operation), None)
        # The host is ahead of the other passes.
        assert drawn is not None or (work.resource == "host" and work.pass_name != "dispatch")
        if drawn is not None and work.resource != "host":
            assert (drawn.chunk, drawn.resource) == (task.chunk, work.resource)
            assert (drawn.start_us, drawn.end_us) == (times.start_us, times.end_us)
    assert ran == {}
    assert max(span.end_us for span in track.spans) == pytest.approx(found.total_us)


def test_launches_take_the_host_one_at_a_time(predicted: Timeline) -> None:
    (track,) = predicted.tracks
    launches = [span for span in track.spans if span.resource == "host"]
    assert len(rows_of(launches)) == 1
    by_key = {(span.pass_name, span.stage, span.operation): span for span in launches}
    for ran in track.spans:
        launch = by_key.get((ran.pass_name, ran.stage, ran.operation))
        if ran.resource != "host" and launch is not None:
            assert launch.end_us <= ran.start_us + 1e-6
        # Launches ahead of a pass are not drawn.
        assert launch is not None or ran.pass_name != "dispatch" or ran.resource == "host"


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


def timed(
    pass_name: str, steps: Sequence[tuple[str, int, float]], operations: Sequence[Operation]
) -> list[TimedStep]:
    return [TimedStep(action, pass_name, operations[at], us, us) for action, at, us in steps]


def fields(spans: list[Span]) -> list[tuple[str, str, str, float, float]]:
    return [(span.stage, span.resource, span.action, span.start_us, span.end_us) for span in spans]


def test_spans_of_a_collective_and_the_copies_around_it() -> None:
    stages = [
        Stage(work_of(name, resource, (0.0,)), 0)
        for name, resource in (("copy", "memory"), ("alltoall", "inter"), ("order", "memory"))
    ]
    plain = [operation_of(number, number, 0, stages) for number in range(3)]
    # It was through at 8, and noticed at 9.
    ends_us = {("dispatch", 1): 8.0}

    def steps(policy: Policy) -> list[TimedStep]:
        return timed("dispatch", STEPS, with_waits(plain, [[], [0], [1]], policy))

    assert fields(spans_of(steps("host"), ends_us)) == [
        ("copy", "memory", "run", 0.0, 2.0),
        ("alltoall", "inter", "run", 2.5, 8.0),
        ("alltoall", "host", "launch", 2.5, 3.0),
        ("alltoall", "host", "wait", 3.1, 9.0),
        ("order", "memory", "run", 9.0, 10.0),
    ]
    # Where the device copies, the host only launches.
    assert fields(spans_of(steps("streams")[2:], ends_us)) == [
        ("alltoall", "inter", "run", 2.5, 8.0),
        ("alltoall", "host", "launch", 2.0, 3.0),
        ("order", "memory", "run", 9.0, 10.0),
        ("order", "host", "launch", 3.0, 10.0),
    ]


def test_a_transposed_gather_is_summed_before_what_comes_next() -> None:
    steps = (
        ("begin", 1, 0.0),
        ("wait", 0, 1.0),
        ("ready", 0, 4.0),
        ("end", 1, 6.0),
        ("begin", 2, 6.0),
        ("start", 2, 6.0),
        ("end", 2, 7.0),
    )
    names = (("allgather", "intra"), ("sum of allgather", "memory"), ("alltoall", "inter"))
    stages = [Stage(work_of(name, resource, (0.0,)), 0) for name, resource in names]
    plain = [operation_of(number, number, 1, stages) for number in range(3)]
    operations = with_waits(plain, [[], [0], [1]], "host")
    ran = {
        span.stage: (span.start_us, span.end_us)
        for span in spans_of(timed("combine", steps, operations), {("combine", 2): 9.0})
        if span.action == "run"
    }
    assert ran == {"sum of allgather": (4.0, 6.0), "alltoall": (6.0, 9.0)}


def test_overlap_by_hand() -> None:
    # Network 0 to 10, node link 4 to 6 and 5 to 12, memory 20 to 24, the host waits all the time.
    spans = (
        span("inter", 0, 10),
        span("intra", 4, 6),
        span("intra", 5, 12, chunk=1),
        span("memory", 20, 24),
        span("host", 0, 1, "launch"),
        span("host", 1, 24, "wait"),
    )
    idle = Track(name="idle", spans=(span("inter", 0, 10),))
    timeline = Timeline(
        source="recorded", name="a chain", tracks=(Track(name="busy", spans=spans), idle)
    )
    dispatch, total = overlaps(timeline)
    assert (dispatch.pass_name, total.pass_name) == ("dispatch", "all")
    assert dispatch.total_us == 24
    # Means of two ranks.
    assert dispatch.busy_us == {"inter": 10, "intra": 4, "memory": 2, "host": 0.5}
    assert dispatch.hidden_share == {"inter": 6 / 20, "intra": 6 / 8, "memory": 0}
    assert total.busy_us == dispatch.busy_us and total.hidden_share == dispatch.hidden_share


def test_what_overlaps_on_one_resource_gets_more_rows() -> None:
    spans = [span("inter", 0, 4), span("inter", 2, 6), span("inter", 4, 5), span("inter", 6, 7)]
    assert [[(span.start_us, span.end_us) for span in row] for row in rows_of(spans)] == [
        [(0, 4), (4, 5), (6, 7)],
        [(2, 6)],
    ]


def test_trace_has_a_process_per_rank_and_a_thread_per_resource(predicted: Timeline) -> None:
    twice = replace(predicted, tracks=(*predicted.tracks, *predicted.tracks))
    trace = json.loads(json.dumps(chrome_trace([twice], {"cluster": "here"})))
    assert trace["otherData"] == {"cluster": "here"}
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    names: dict[tuple[str, int, int], Any] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
        else:
            assert event["ph"] == "M"
            key = (event["name"], event["pid"], event["tid"])
            assert key not in names
            names[key] = event["args"]
    assert sum(map(len, slices.values())) == 2 * len(predicted.tracks[0].spans)
    assert {process for process, _ in slices} == {1000, 2000}
    for process, thread in slices:
        assert names["process_name", process, 1]["name"] == (
            "hierarchical_alltoall in 4 chunks: busiest rank, predicted"
        )
        # Perfetto draws the two on one track, and drops what overlaps there.
        assert thread not in (0, process)
        assert names["thread_sort_index", process, thread]["sort_index"] == thread
    first = [names["thread_name", at, thread]["name"] for at, thread in slices if at == 1000]
    assert first[0] == "network" and {"node link", "memory", "host"} <= set(first)
    for events in slices.values():
        # Slices of a thread have to be nested; ours follow each other.
        events.sort(key=lambda event: event["ts"])
        for event, following in pairwise(events):
            assert event["ts"] + event["dur"] < following["ts"]
        assert all(event["dur"] >= 0 and event["cat"] for event in events)


def test_the_command_draws_what_the_planner_picks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", *FLAGS, "--out", str(tmp_path / "new"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main(["plan", *FLAGS, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert document["title"].startswith(f"{plan['chain']} in {plan['num_chunks']} chunks")
    # Stock alltoall above it, priced as the candidate of that name.
    (stock_us,) = (row["predicted_us"] for row in plan["candidates"] if row["chain"] == "alltoall")
    assert document["ratio_to_alltoall"] == pytest.approx(stock_us / plan["predicted_us"])
    totals_us = [row["total_us"] for row in document["overlaps"] if row["pass_name"] == "all"]
    assert totals_us == pytest.approx([stock_us, plan["predicted_us"]])
    assert document["overlaps"][-1]["total_us"] == pytest.approx(plan["predicted_us"])
    picture, trace = (Path(document["files"][kind]) for kind in ("picture", "trace"))
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.parent == tmp_path / "new"
    assert json.loads(trace.read_text())["otherData"]["model"] == "qwen3_235b_a22b"


def test_one_phase_and_one_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--phase", "forward", "--chain", "alltoall", "--out", str(tmp_path)]
    assert main(["timeline", *flags, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["pass_name"] for row in document["overlaps"]] == ["dispatch", "combine", "all"]
    assert Path(document["files"]["trace"]).name == "alltoall_x1.trace.json"
    # It is what others are compared with.
    assert document["ratio_to_alltoall"] is None


def test_passes_end_to_end_by_hand() -> None:
    # Dispatch from 100 to 110 over both ranks, experts up to 150, combine from 150 to 170.
    combine = replace(span("intra", 155, 170), pass_name="combine")
    first = Track(name="0", spans=(span("inter", 100, 108), combine))
    second = Track(
        name="1", spans=(span("inter", 102, 110), replace(combine, start_us=150, end_us=160))
    )
    timeline = Timeline(source="recorded", name="a chain", tracks=(first, second))
    moved = end_to_end(timeline)
    assert [[(s.start_us, s.end_us) for s in track.spans] for track in moved.tracks] == [
        [(0, 8), (15, 30)],
        [(2, 10), (10, 20)],
    ]
    comparison = Comparison(stock=timeline, ours=replace(timeline, tracks=(second,)), about=())
    assert comparison.total_us == (30, 18)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.json", "--ep", "2"], "--ep: got 2, must be left out with RECORDING"),
        ([*FLAGS, "--chain", "alltoall", "--num-chunks", "2"], "must be 1 for the serial chain"),
        ([*FLAGS, "--num-chunks", "2"], "--num-chunks: got 2, must be left out without --chain"),
        ([*FLAGS, "--experts", "8"], "--experts: got 8, must be left out with --model"),
        (["--record", "x", "--experts", "8"], "RANK, WORLD_SIZE: not set"),
        ([*FLAGS, "--chain", "alltoall", "--out", str(MODEL)], "--out: got"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["timeline", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("monta timeline: ") and words in line
