"""Windows of layers that share an exchange, and of models that come one after the other."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")
from monta_megatron.chains import CHAINS
from monta_megatron.core import Layout, Shape
from monta_megatron.exchange import iteration_clock
from monta_megatron.integration import auto
from monta_megatron.planner.choose import Planner
from monta_megatron.planner.cluster_file import uncalibrated
from monta_megatron.planner.routing.expected import UniformRouting

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
COUNTS: Any = SimpleNamespace(tags=ZEROS, max_tokens=64, received_rows=ZEROS)
TUNE_STEPS = 6


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[auto.AutoChoice]:
    """Choices of two shapes on one exchange."""
    monkeypatch.setattr(auto, "_shared", {})
    monkeypatch.setattr(auto, "is_usable", lambda _: True)
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
    for name in ("first", "second"):
        auto._shared[name,] = auto.AutoChoice(
            planner, TUNE_STEPS, False, {"shape": name}, group, False
        )
    return auto.choosers()


def train(step_of: torch.optim.Optimizer, *used: auto.AutoChoice) -> None:
    """An iteration with a micro-batch of each."""
    for chooser in used:
        assert chooser.choose(COUNTS, True, torch.device("cpu")) is not None
    auto._enter_step(step_of)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])


def test_layers_of_two_shapes_take_turns_one_after_the_other(two: list[auto.AutoChoice]) -> None:
    first, second = two
    step_of, measuring = optimizer(), []
    for _ in range(2 * TUNE_STEPS + 4):
        train(step_of, first, second)
        measuring.append((first.is_measuring, second.is_measuring))
    assert not any(all(each) for each in measuring)
    assert first.window is not None and second.window is not None
    assert (first.window.first, second.window.first) == (0, TUNE_STEPS + auto.LATE)


def test_a_model_that_was_dropped_holds_up_no_window(two: list[auto.AutoChoice]) -> None:
    """Its layers may be there still, on some ranks: the other ranks open the window now."""
    dropped, model = two
    step_of = optimizer()
    train(step_of, dropped)
    for _ in range(2):
        assert dropped.is_measuring
        train(step_of, model)
    assert model.window is not None and model.window.first == 2


def test_what_lies_between_optimizers_is_not_measured(two: list[auto.AutoChoice]) -> None:
    """An actor and a critic of one shape, whose optimizers step one after the other."""
    shared, _ = two
    actor, critic = optimizer(), optimizer()
    clock = iter(range(0, 10**9, 10**6))
    with mock.patch.object(iteration_clock, "_mark", lambda **_: next(clock)):
        for _ in range(3):
            train(critic, shared)
            # A rollout.
            next(clock), next(clock)
            train(actor, shared)
    # Of two segments, 1 ms each.
    assert shared.step == 3 and shared._records[-2].ticks == 2_000 // auto.TICK_US


def test_a_first_turn_is_announced_once(two: list[auto.AutoChoice]) -> None:
    """Though the steps of other layers' optimizers come before its exchanges."""
    shared, said = two[0], list[str]()
    shared._report = said.append  # type: ignore[assignment]
    train(optimizer(), shared)
    others = optimizer()
    for _ in range(TUNE_STEPS - 1):
        auto._enter_step(others)
    first = [line for line in said if "is the first with" in line]
    assert len(first) == len({line.rpartition(" with ")[2] for line in first}) == 2
