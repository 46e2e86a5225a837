"""One iteration of a training is recorded: which one, its passes, and the times of a GPU's events.

The device is not there: events carry the time at which they would have been reached.
"""

import atexit
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_world import RANK, fake_world
from linear_pipeline import Stage, operation_of

from monta_megatron.chains import CHAINS
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.integration import metrics
from monta_megatron.integration.options import Options
from monta_megatron.planner.schedule import Work

STAGES = [
    Stage(Work(stage="copy", resource="memory", times_us=(0.0,)), 0),
    Stage(Work(stage="alltoall", resource="inter", times_us=(0.0,)), 0),
]
COPY, ALLTOALL = (operation_of(number, number, 0, STAGES) for number in range(2))


class Event:
    """An event that the device reaches 1 ms after the one before."""

    reached_ms = itertools.count()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "a stream"
        self.at_ms = next(self.reached_ms)

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "Event") -> float:
        return float(end.at_ms - self.at_ms)


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """What the recorder reads of one, on a GPU whose clock is 5 us late."""
    clock = SimpleNamespace(name="a clock", offset_us=5.0, error_us=0.5)
    monkeypatch.setattr(metrics, "Clock", lambda group, device: clock)
    monkeypatch.setattr("monta_megatron.exchange.step_times.now_us", lambda: 0.0)
    monkeypatch.setattr(metrics, "_recorders", [])
    monkeypatch.setattr(Event, "reached_ms", itertools.count())
    for name, value in {
        "Event": Event,
        "synchronize": lambda: None,
        "current_stream": lambda: "a stream",
        "get_device_name": lambda: "a GPU",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with fake_world():
        dispatcher = SimpleNamespace(
            options=Options(record=str(tmp_path / "timeline"), record_iteration=2),
            monitor=Monitor(),
            probs=SimpleNamespace(device=torch.device("cuda")),
            tp_ep_group=dist.group.WORLD,
            layout=SimpleNamespace(ep=16, etp=1, rank=0, nodes=(0,)),
            config=SimpleNamespace(
                tensor_model_parallel_size=1,
                num_moe_experts=16,
                moe_router_topk=2,
                params_dtype=torch.bfloat16,
            ),
            chain=CHAINS["alltoall"],
            num_chunks=1,
            hidden_shape=torch.Size((4, 2, 32)),
        )
        yield dispatcher
        for recorder in metrics._recorders:
            recorder._stop_watching()
            atexit.unregister(recorder._say_if_not_reached)


def run_pass(monitor: Monitor, name: str) -> None:
    """A copy, then a collective that is waited for."""
    with monitor.range(name, "alltoall", COPY):
        pass
    with monitor.range(name, "alltoall", ALLTOALL):
        monitor.note("start", name, ALLTOALL)
        assert monitor.watch([], name, ALLTOALL) == []
    monitor.note("wait", name, ALLTOALL)
    monitor.note("ready", name, ALLTOALL)


def step() -> None:
    """Two optimizers step, as Megatron's do for dense layers and experts."""
    for _ in range(2):
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        torch.optim.SGD([parameter]).step()


def test_the_iteration_that_was_asked_for(dispatcher: Any, tmp_path: Path, capsys: Any) -> None:
    metrics.record_iteration(dispatcher)
    other = SimpleNamespace(monitor=Monitor())
    metrics.record_iteration(other)
    assert other.monitor.recorder is None
    folder = tmp_path / "timeline"

    run_pass(dispatcher.monitor, "dispatch")
    step()
    assert not list(folder.iterdir()) and next(Event.reached_ms) == 0
    # As at the end of a run that is too short.
    metrics._recorders[0]._say_if_not_reached()
    assert "the run ended in iteration 2, before the end of iteration 2" in capsys.readouterr().out
    # Two micro-batches.
    for _ in range(2):
        run_pass(dispatcher.monitor, "dispatch")
    run_pass(dispatcher.monitor, "dispatch_backward")
    step()
    assert dispatcher.monitor.recorder is None
    step()
    said = capsys.readouterr().out
    metrics._recorders[0]._say_if_not_reached()
    assert capsys.readouterr().out == ""

    (path,) = folder.iterdir()
    assert path.name == f"rank_{RANK:05}.json"
    document = json.loads(path.read_text())
    assert (document["iteration"], document["device"], document["tokens"]) == (2, "a GPU", 8)
    assert document["clock_error_us"] == 0.5
    runs = [(run["spans"][0]["pass_name"], run["turn"]) for run in document["passes"]]
    assert runs == [("dispatch", 0), ("dispatch", 1), ("dispatch_backward", 0)]
    assert f"monta timeline {folder}" in said
    # Steps are 1 ms apart: a copy begins and ends, a collective begins, starts, ends being issued
    # at 5, is waited for from 6 on and has finished at 7. Everything is 5 us earlier on the first
    # rank's clock.
    ran = {
        span["stage"]: (span["start_us"], span["end_us"])
        for span in document["passes"][0]["spans"]
        if span["action"] == "run"
    }
    assert ran == {"copy": (995.0, 1995.0), "alltoall": (3995.0, 6995.0)}


def test_a_file_that_cannot_be_written_ends_nothing(
    dispatcher: Any, tmp_path: Path, capsys: Any
) -> None:
    dispatcher.options = Options(record=str(tmp_path / "timeline"), record_iteration=1)
    metrics.record_iteration(dispatcher)
    (tmp_path / "timeline").rmdir()
    run_pass(dispatcher.monitor, "dispatch")
    step()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("monta: iteration 1 is not recorded: ") and "cannot be written" in line
