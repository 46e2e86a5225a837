"""Whole exchanges with Triton kernels, in Triton's interpreter, against PyTorch's operations.

It needs TRITON_INTERPRET=1 before the kernels are imported. Rows are fp32 or fp16: the interpreter
does not round to bf16 as a GPU does.
"""

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from equal import assert_equal
from fake_kernels import recorded_launches
from stream_recorder import RecordedWork, Recorder
from test_stream_safety import LAYOUTS, NUM_BLOCKS, Layer

from monta_megatron.calibration.tasks import NUM_COPIES, Point
from monta_megatron.chains import CHAINS
from monta_megatron.core import Layout
from monta_megatron.exchange import count_messages
from monta_megatron.exchange.buffers import MessageFormat
from monta_megatron.exchange.count_messages import CountMessages

assert os.environ.get("TRITON_INTERPRET") == "1", "kernels would be launched on a GPU"


class MovingRecorder(Recorder):
    """Rows that come from other ranks are rows of this one, where those of all ranks differ.

    Attributes:
        sent: the bytes of every message that was sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[torch.Tensor] = []

    def collective(
        self, output: torch.Tensor, input_: torch.Tensor, share: Any, group: Any
    ) -> RecordedWork:
        with self.muted():
            self.sent.append(input_.contiguous().flatten().view(torch.uint8).clone())
        work = super().collective(output, input_, share, group)
        if share is None and len(input_) > 0:
            with self.muted():
                output.copy_(input_[(7 * torch.arange(len(output)) + 3) % len(input_)])
        return work


def compare(chain_name: str, layout_name: str) -> None:
    """Every pass, and its counts, in both kinds of kernels.

    Raises:
        AssertionError: names what differs.
    """
    of_layout = {"layout": LAYOUTS[layout_name], "num_blocks": NUM_BLOCKS}
    counts = CountMessages(chains=(CHAINS[chain_name],), **of_layout)
    routing_map = Layer(chain_name, layout_name, num_tokens=11).routing_map
    expected, _ = counts.count(routing_map, tag=5)
    with mock.patch.object(count_messages, "is_fused", lambda *_: True):
        actual, _ = counts.count(routing_map, tag=5)
    assert torch.equal(actual, expected), "counts differ"
    for dtype in (torch.float32, torch.float16):
        fields = {"num_tokens": 11, "hidden": 40, "dtype": dtype}
        _compare_passes(chain_name, LAYOUTS[layout_name], **fields)


def compare_two_models(chain_name: str) -> None:
    """Two models of one process, whose layers differ in their experts alone.

    Raises:
        AssertionError: names what differs.
    """
    for num_local_experts in (2, 3):
        layout = replace(LAYOUTS["ep4"], num_local_experts=num_local_experts)
        _compare_passes(chain_name, layout, num_tokens=11, hidden=40)


def _compare_passes(chain_name: str, layout: Layout, **fields: Any) -> None:
    kinds = (_passes(chain_name, layout, fused=fused, **fields) for fused in (True, False))
    for number, pair in enumerate(zip(*kinds, strict=True)):
        assert_equal(*pair, f"{layout}, {fields}: output, gradients, messages, number {number}")


def calibrate() -> None:
    """What a calibration times in memory is one launch each, and rows arrive."""
    from monta_megatron.calibration.timer import starter_of

    starter = starter_of({}, torch.device("cpu"), fused=True)
    for name, value in (("copy", 1), ("sum", NUM_COPIES)):
        point = Point(operation=name, resource="memory", group_size=1, num_rows=11, row_bytes=4096)
        start, launches = starter(point), []
        with recorded_launches(lambda *launch, to=launches: to.append(launch), nullcontext):
            results = start()()
        assert len(launches) == 1, f"{name}: {launches}"
        assert torch.all(results[-1] == value), f"{name}: {results[-1]}"


def _passes(chain_name: str, layout: Layout, fused: bool, **fields: Any) -> list[torch.Tensor]:
    """Output and gradients of a layer, and every message that was sent."""
    recorder = MovingRecorder()
    layer = Layer(chain_name, layout, recorder=recorder, fused=fused, **fields)
    # What is not written differs.
    allocate, before = MessageFormat.allocate, 255 if fused else 170

    def allocate_filled(payload: MessageFormat, num_rows: int) -> list[torch.Tensor]:
        messages = allocate(payload, num_rows)
        with recorder.muted():
            for message in messages:
                message.view(torch.uint8).fill_(before)
        return messages

    with (
        mock.patch.object(MessageFormat, "allocate", allocate_filled),
        recorder,
        recorded_launches(recorder.kernel, run=recorder.muted),
    ):
        results = layer.run()
    launched = any(each.name.startswith("triton ") for each in recorder.queue)
    has_kernels = CHAINS[chain_name].rows == "tokens" or layout.etp > 1
    assert launched == (fused and has_kernels), "what was launched"
    assert recorder.findings == []
    return results + recorder.sent
