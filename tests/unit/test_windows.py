"""Tuning windows of models that come one after the other; `tests/dist/test_iterations.py` trains.

There layers of two shapes are tuned one after the other too.
"""

import gc
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")
from monta_megatron.chains import CHAINS
from monta_megatron.core import Layout, Shape
from monta_megatron.exchange import monitor
from monta_megatron.integration import auto
from monta_megatron.planner import tuning
from monta_megatron.planner.choose import Planner
from monta_megatron.planner.cluster_file import uncalibrated
from monta_megatron.planner.routing import UniformRouting
from monta_megatron.planner.tuning import Tuner

LAYOUT = Layout(ep=2, etp=1, num_local_experts=2, rank=0, nodes=(0, 1))
SHAPE = Shape(
    layout=LAYOUT,
    hidden_size=32,
    value_bytes=4,
    prob_bytes=4,
    routing=UniformRouting(num_experts=4, topk=2),
    tokens_per_rank=1,
)
# Of two ranks that say the same.
ZEROS = np.zeros(2, np.int64)
TAGS = ZEROS | auto.IN_TRAINING
COUNTS: Any = SimpleNamespace(tags=TAGS, max_tokens=64, received_rows=ZEROS)
TUNE_STEPS = 6
said: list[str] = []


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[auto.AutoChooser]:
    """Choices of two shapes on one exchange."""
    monkeypatch.setattr(auto, "_shared", WeakValueDictionary())
    monkeypatch.setattr(auto, "_tuning", set())
    monkeypatch.setattr(auto, "is_open", lambda _: True)
    ranks = {"get_rank": lambda: 1, "get_group_rank": lambda *_: 1}
    ranks["get_process_group_ranks"] = lambda _: [0, 1]
    monkeypatch.setattr(auto, "dist", SimpleNamespace(**ranks))
    planner = Planner(
        chains=tuple(CHAINS.values()),
        num_chunks=(1, 2),
        shape=SHAPE,
        cluster=uncalibrated(LAYOUT, None),
    )
    group: Any = SimpleNamespace()
    choosers = []
    for number in range(2):
        tuner = Tuner(planner=planner, num_steps=TUNE_STEPS, report=said.append)
        chooser = auto.AutoChooser(tuner, False, {"shape": number}, group)
        auto._shared[number] = chooser
        choosers.append(chooser)
    return choosers


def train(step_of: torch.optim.Optimizer, *used: auto.AutoChooser) -> None:
    """An iteration with a micro-batch of each."""
    for chooser in used:
        assert chooser.choose(COUNTS, torch.device("cpu")) is not None
        chooser.time_exchange(chooser, COUNTS).train(torch.empty(0))
    auto._enter_step(step_of)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize("is_collected", [False, True])
def test_a_dropped_model_holds_up_windows_for_a_step(
    two: list[auto.AutoChooser], is_collected: bool
) -> None:
    """On every rank, whether it has collected the layers or not."""
    dropped, model = two
    step_of = optimizer()
    train(step_of, dropped)
    if is_collected:
        two.clear()
        del dropped
        gc.collect()
    for _ in range(3):
        train(step_of, model)
    assert model.tuner.window is not None and model.tuner.window.first == 2
    assert auto._tuning == {model}


def test_the_clock_keeps_no_layer(two: list[auto.AutoChooser]) -> None:
    """A chooser stays while its window is open; shared experts go with their dispatcher."""
    chooser, _ = two
    layer = optimizer()
    kept = weakref.ref(layer)
    for _ in range(2):
        chooser.choose(COUNTS, torch.device("cpu"))
        chooser.time_exchange(layer, COUNTS)
        auto._enter_step(layer)
    chooser.choose(COUNTS, torch.device("cpu"))
    chooser.time_exchange(layer, COUNTS)
    del layer
    assert chooser in auto._tuning and kept() is None


def test_a_segment_that_never_ends_does_not_grow() -> None:
    """Layers that run in training mode for days, without a step of an optimizer."""
    clock = monitor.IterationClock()

    def segment(num_exchanges: int) -> monitor.Segment:
        clock.start(torch.device("cpu"))
        for _ in range(num_exchanges):
            timed = clock.add(clock, tokens=64)
            assert timed is not None
            timed.train(torch.empty(0))
        clock.stop()
        return clock.take()[0]

    endless = segment(monitor.MAX_EXCHANGES + 1)
    assert len(endless.exchanges) == monitor.MAX_EXCHANGES
    # What was dropped may be pauses.
    assert monitor.us_of([endless]) is None and monitor.us_of([segment(2)]) is not None


@pytest.mark.parametrize("is_late", [False, True])
def test_a_backward_pass_behind_a_reference_is_timed(is_late: bool) -> None:
    """1 ms of a policy's forward pass, 10 ms of its reference's, 4 ms of backward.

    Where backward is late, as a critic's behind the actor's optimizer, it lies outside.
    """
    clock, now = monitor.IterationClock(), mock.Mock()
    with mock.patch.object(monitor.time, "perf_counter_ns", now):
        now.return_value = 0
        clock.start(torch.device("cpu"))
        policy = clock.add(clock, tokens=64)
        assert policy is not None
        now.return_value = 1_000_000
        clock.add(clock, tokens=64)
        if is_late:
            now.return_value = 5_000_000
            clock.stop()
        now.return_value = 11_000_000
        policy.train(torch.empty(0))
        now.return_value = 15_000_000
        clock.stop()
    assert monitor.us_of(clock.take()) == (1_000 if is_late else 5_000)


class Event(NamedTuple):
    """An event of a device, which tells milliseconds."""

    ns: int

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return (end.ns - self.ns) / 1e6


@pytest.mark.parametrize("mark", [int, Event])
def test_what_lies_between_optimizers_is_not_measured(
    two: list[auto.AutoChooser], mark: Any
) -> None:
    """An actor and a critic of one shape, whose optimizers step one after the other."""
    shared, _ = two
    actor, critic = optimizer(), optimizer()
    clock = iter(range(0, 10**9, 10**6))
    with mock.patch.object(monitor, "_mark", lambda **_: mark(next(clock))):
        for _ in range(3):
            train(critic, shared)
            # A rollout.
            next(clock), next(clock)
            train(actor, shared)
    # The head of step 3 has the time of step 1, of two segments of 1 ms each.
    assert shared.tuner.step == 3 and shared.tag(True) & auto.MAX_TICKS == 2_000 // auto.TICK_US


@pytest.mark.parametrize(("ticks", "us"), [((7, 5), [70]), ((0, 5), []), ((0, 0), [])])
def test_the_slowest_rank_s_time_is_compared_unless_one_has_none(
    two: list[auto.AutoChooser], ticks: tuple[int, int], us: list[int]
) -> None:
    counts: Any = SimpleNamespace(**{**vars(COUNTS), "tags": TAGS | np.array(ticks)})
    with mock.patch.object(two[0].tuner, "add_time") as add_time:
        two[0].choose(counts, torch.device("cpu"))
    assert [call.args[0] for call in add_time.call_args_list] == us


def test_a_first_trial_is_announced_once(two: list[auto.AutoChooser]) -> None:
    """Though the steps of other layers' optimizers come before its exchanges."""
    shared = two[0]
    said.clear()
    train(optimizer(), shared)
    others = optimizer()
    for _ in range(TUNE_STEPS - 1):
        auto._enter_step(others)
    first = [line for line in said if "is the first with" in line]
    assert len(first) == len({line.rpartition(" with ")[2] for line in first}) == 2


def test_a_second_window_waits_until_other_layers_are_tuned(two: list[auto.AutoChooser]) -> None:
    """It is due 1,000 steps after the first, here 10; others tune until step 13."""
    tuner = two[0].tuner
    with mock.patch.object(tuning, "STEPS_TO_SECOND", 10):
        tuner.open_window(64)
    for _ in range(13):
        tuner.next_step([64], others_tune=True)
    assert tuner.window is not None and tuner.window.first == 0
    tuner.next_step([64], others_tune=False)
    assert tuner.window.first == 14
    # What ran before needs no warm-up.
    assert tuner.window.warm == set(tuner.window.candidates)
