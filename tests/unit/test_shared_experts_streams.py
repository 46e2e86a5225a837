"""Shared experts that overlap with dispatch: where they are launched; see stream_recorder."""

import dataclasses
from typing import Any

import pytest
import torch
from stream_recorder import RecordedStream, Recorder, times_in_one_queue
from test_stream_safety import NUM_CHUNKS, Layer, each_case, order_of

from monta_megatron.exchange.executor import dispatch


@pytest.mark.parametrize("num_chunks", NUM_CHUNKS[:3])
@each_case
def test_shared_experts_start_before_the_second_collective_of_dispatch(
    chain_name: str, layout_name: str, num_chunks: int
) -> None:
    """Also in one launch queue, and the pass has the same collectives and results."""
    layer, recorder = Layer(chain_name, layout_name, num_chunks), Recorder()
    layer = dataclasses.replace(layer, recorder=recorder)
    shared, weights = RecordedStream(recorder, "shared experts"), torch.ones(3)
    placed: list[Any] = []

    def fc1(arriving: torch.Tensor) -> None:
        placed.append(arriving.grad_fn)
        with torch.cuda.stream(shared):
            recorder.kernel("fc1", [], [weights])

    with recorder:
        rows, probs, ids = layer.inputs()
        shared.wait_stream(torch.cuda.current_stream())
        arrived = dispatch(layer.exchange, rows, probs, ids, fc1)
        of_dispatch = order_of(recorder)
        # Launched in backward before the shared experts', whose place is below it.
        assert placed == [arrived[0].grad_fn]
        gradients = torch.autograd.grad(arrived[0].sum() + arrived[1].sum(), [rows, probs])
        results = [*arrived, *gradients]
    assert recorder.findings == []
    times = times_in_one_queue(recorder.queue)
    (start,) = [times[entry][0] for entry in recorder.queue if entry.name == "fc1"]
    starts = [times[entry][0] for entry in recorder.collectives()[: len(of_dispatch)]]
    assert len(starts) < 2 or start < starts[1]

    plain = Layer(chain_name, layout_name, num_chunks)
    with plain.recorder:
        arrived = dispatch(plain.exchange, *(inputs := plain.inputs()))
        total = arrived[0].sum() + arrived[1].sum()
        expected = [*arrived, *torch.autograd.grad(total, inputs[:2])]
    assert order_of(recorder) == order_of(plain.recorder)
    assert all(map(torch.equal, results, expected))


@each_case
def test_a_pass_is_abandoned_where_shared_experts_fail(chain_name: str, layout_name: str) -> None:
    """Its memory is freed behind the message that is in flight."""

    def fc1(_: torch.Tensor) -> None:
        raise ValueError("no memory")

    layer = Layer(chain_name, layout_name)
    recorder = layer.recorder
    with recorder:
        try:
            dispatch(layer.exchange, *layer.inputs(), fc1)
        except ValueError as error:
            assert str(error) == "no memory"
        del layer
    assert recorder.collectives() and recorder.findings == []
