"""Times of a device, by events, on the host's clock."""

from typing import Any

import pytest
import torch
from linear_pipeline import Stage, operation_of, work_of

from monta_megatron.exchange.monitor import Monitor, Step
from monta_megatron.tools import record

COPY = Stage(work_of("copy", "memory", (0.0,)), 0)
SEND = Stage(work_of("alltoall", "inter", (0.0,)), 0)


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


def test_a_collective_ends_at_the_first_wait_and_a_group_runs_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "now_us", lambda: FakeEvent.now_us)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    FakeEvent.now_us = 100.0
    recorder = record.ProgramRecorder(is_device=True)
    first, second = (operation_of(number, 0, number, [SEND]) for number in range(2))
    for at_us, action, operation in (
        (200, "begin", first),
        (201, "start", first),
        (202, "end", first),
        (202, "begin", second),
        (203, "start", second),
        (204, "end", second),
        (230, "ready", first),
        (240, "ready", second),
        (250, "ready", first),
    ):
        FakeEvent.now_us = at_us
        if at_us == 200:
            recorder.begin("dispatch")
        recorder.note(Step(action, "dispatch", operation))
    recorder.end()
    passes, spans = recorder.taken()
    # The host is ahead by 5 us: a pass lasts from when it comes there until the device has ended.
    assert passes == {"dispatch": (200, 255)}
    assert [(s.chunk, s.start_us, s.end_us) for s in spans if s.resource == "inter"] == [
        (0, 206, 235),
        (1, 235, 245),
    ]
    assert [(s.start_us, s.end_us) for s in spans if s.resource == "host"] == [
        (200, 202),
        (202, 204),
    ]


def test_events_lie_on_the_hosts_clock_and_in_order() -> None:
    if not torch.cuda.is_available() or torch.version.cuda is None:
        pytest.skip("needs a GPU: events have no times elsewhere")
    recorder = record.ProgramRecorder(is_device=True)
    monitor = Monitor(recorder=recorder)
    rows = torch.ones(4096, 4096, device="cuda")
    recorder.begin("dispatch")
    for chunk in range(2):
        with monitor.range("dispatch", "alltoall", operation_of(chunk, 0, chunk, [COPY])):
            rows = rows @ rows
    recorder.end()
    passes, spans = recorder.taken()
    (start_us, end_us), (first, second) = passes["dispatch"], spans[::2]
    # By how much the clocks may differ.
    slack_us = 1000
    assert start_us - slack_us <= first.start_us < first.end_us <= second.start_us
    assert second.end_us <= end_us <= record.now_us() + slack_us
    # 2 * 4096^3 operations take no GPU less than 50 us, in fp32.
    assert first.end_us - first.start_us > 50
