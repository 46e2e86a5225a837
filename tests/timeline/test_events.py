"""Times of a device, by events, on the host's clock."""

from typing import Any
from unittest import mock

import pytest
import torch
from linear_pipeline import Stage

from monta_megatron.exchange.monitor import Action, Step
from monta_megatron.tools import record
from monta_megatron.tools.record import Recorder

COPY, SEND = Stage("memory"), Stage("inter")


class FakeEvent:
    """An event of a device that comes to everything 5 us after the host."""

    now_us = 0.0

    def __init__(self, **options: Any) -> None:
        self.at_us = 0.0

    def record(self) -> None:
        self.at_us = FakeEvent.now_us + 5

    def synchronize(self) -> None:
        FakeEvent.now_us += 5

    def elapsed_time(self, other: "FakeEvent") -> float:
        return (other.at_us - self.at_us) / 1e3


# Two collectives of a group, as (time, action, chunk): one ends at the first wait, and the group
# runs them in order. The host is ahead by 5 us: a pass lasts from when it comes there until the
# device has ended.
TWO_SENDS: list[tuple[float, Action, int]] = [
    (200, "begin", 0),
    (201, "start", 0),
    (202, "end", 0),
    (202, "begin", 1),
    (203, "start", 1),
    (204, "end", 1),
    (230, "ready", 0),
    (240, "ready", 1),
    (250, "ready", 0),
]
ON_A_DEVICE = [
    ("host", 0, 200, 202),
    ("host", 1, 202, 204),
    ("inter", 0, 206, 235),
    ("inter", 1, 235, 245),
    ("pass", None, 200, 255),
]
# A collective of a CPU rank that ends at 8, which is noticed at 9, between two copies.
COPIES_AND_SEND: list[tuple[float, Action, int]] = [
    (0.0, "begin", 0),
    (2.0, "end", 0),
    (2.0, "begin", 1),
    (2.5, "start", 1),
    (3.0, "end", 1),
    (3.0, "begin", 2),
    (3.1, "wait", 1),
    (9.0, "ready", 1),
    (10.0, "end", 2),
]
ON_A_CPU_RANK = [
    ("inter", 1, 2.5, 8),
    ("memory", 0, 0, 2),
    ("memory", 2, 9, 10),
    ("pass", None, 0, 10),
]


@pytest.mark.parametrize(
    ("stages", "steps", "expected"),
    [([SEND], TWO_SENDS, ON_A_DEVICE), ([COPY, SEND, COPY], COPIES_AND_SEND, ON_A_CPU_RANK)],
)
def test_when_operations_run(
    monkeypatch: pytest.MonkeyPatch,
    stages: list[Stage],
    steps: list[tuple[float, Action, int]],
    expected: list[tuple[Any, ...]],
) -> None:
    """(resource, number, start, end) of what is recorded in steps of a pass."""
    monkeypatch.setattr(record, "now_us", lambda: FakeEvent.now_us)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    is_device = expected is ON_A_DEVICE
    FakeEvent.now_us = steps[0][0] - 100
    recorder = Recorder(is_device=is_device)
    FakeEvent.now_us = steps[0][0]
    recorder.begin("dispatch")
    for at_us, action, number in steps:
        FakeEvent.now_us = at_us
        position = number % len(stages)
        operation = stages[position].operation(number, position, number)
        recorder.note(Step(action, "dispatch", operation))
        if action == "start" and not is_device:
            # Its thread notes the end, at the latest when the collective is waited for.
            ends = mock.Mock(wait=lambda: setattr(FakeEvent, "now_us", 8))
            recorder.watch([ends], "dispatch", number)[0].wait()
    recorder.end()
    spans = recorder.spans("a row", 0)
    assert sorted((s.resource, s.operation, s.start_us, s.end_us) for s in spans) == expected
