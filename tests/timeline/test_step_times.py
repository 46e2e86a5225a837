"""Times of a GPU, on the host's clock."""

import pytest
import torch
from linear_pipeline import Stage, operation_of, work_of

from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.step_times import DeviceRecorder, now_us

if not torch.cuda.is_available() or torch.version.cuda is None:
    pytest.skip("needs a GPU: events have no times elsewhere", allow_module_level=True)

COPY = Stage(work_of("copy", "memory", (0.0,)), 0)


def test_events_lie_on_the_hosts_clock_and_in_order() -> None:
    monitor = Monitor(recorder=DeviceRecorder())
    rows = torch.ones(4096, 4096, device="cuda")
    before_us = now_us()
    for chunk in range(2):
        operation = operation_of(chunk, 0, chunk, [COPY])
        with monitor.range("dispatch", "alltoall", operation):
            rows = rows @ rows
    taken = monitor.recorder.take()
    after_us = now_us()
    times_us = [step.device_us for step in taken.steps]
    assert [step.action for step in taken.steps] == ["begin", "end"] * 2
    assert times_us == sorted(times_us)
    # By how much the clocks may differ.
    slack_us = 1000
    assert before_us - slack_us <= times_us[0] and times_us[-1] <= after_us + slack_us
    # 2 * 4096^3 operations take no GPU less than 50 us, in fp32.
    assert times_us[1] - times_us[0] > 50
