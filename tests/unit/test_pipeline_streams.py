"""Streams, and the life of buffers, where experts compute between passes; see stream_recorder."""

from typing import Any
from unittest import mock

import pytest
import torch
from stream_recorder import RecordedStream, Recorder
from test_stream_safety import TOKEN_CASES, TWO_COLLECTIVES, Layer, order_of, scaled

from monta_megatron.exchange.buffers import Memory
from monta_megatron.exchange.streams import CudaStreams


def recorded(chain_name: str, layout_name: str) -> tuple[Recorder, list[set[str]]]:
    """A layer in three chunks.

    Returns:
        what was issued to the device; and for each call of the experts, and then for each of their
        backward passes: the passes with a collective that they do not wait for.
    """
    layer, under_way = Layer(chain_name, layout_name), list[set[str]]()
    recorder = layer.recorder

    def look(*_: Any) -> None:
        issued = zip(recorder.collectives(), order_of(recorder), strict=True)
        clock = recorder.current.clock
        under_way.append({name for entry, (name, *_) in issued if not entry.is_in(clock)})

    def experts(*given: torch.Tensor) -> torch.Tensor:
        look()
        outputs = scaled(*given)
        outputs.register_hook(look)
        return outputs

    with recorder:
        layer.run(experts)
    return recorder, under_way


def test_memory_that_is_made_when_it_is_written_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Memory, "reserve", lambda memory: None)
    recorder, _ = recorded("hierarchical_alltoall", "ep4")
    assert {finding.kind for finding in recorder.findings} == {"reuse"}


@pytest.mark.parametrize(("chain_name", "layout_name"), TOKEN_CASES)
def test_a_chunk_is_computed_while_its_neighbours_travel(chain_name: str, layout_name: str) -> None:
    """The next one is dispatched, and the one before is combined; backward likewise."""
    _, under_way = recorded(chain_name, layout_name)
    assert under_way == [
        {"dispatch"},
        {"dispatch", "combine"},
        {"combine"},
        {"combine_backward"},
        {"combine_backward", "dispatch_backward"},
        {"dispatch_backward"},
    ]


# Collectives of 3 chunks on two tiers, by step (D: dispatch, C: combine; r: rail, n: node). A
# combine waits for the experts, so the remaining operations of other passes are issued before it.
STEPS = """
Dr           start D0
Dr Dn Dn Cn  start D1, end D0, rest of D1, start C0
Dr Cr Dn Cn  start D2, rest of C0 and D2, start C1
Cr Cn        rest of C1, start C2
Cr           end C2
"""


@pytest.mark.parametrize(
    ("chain_name", "layout_name"),
    sorted(set(TWO_COLLECTIVES) & set(TOKEN_CASES)),
)
def test_order_of_collectives_by_hand(chain_name: str, layout_name: str) -> None:
    """Backward mirrors forward: combine's backward in place of dispatch."""
    issued = order_of(recorded(chain_name, layout_name)[0])
    expected = [each for line in STEPS.split("\n") for each in line[:11].split()]
    half = len(expected)
    names = {"dispatch": "D", "combine": "C", "combine_backward": "D", "dispatch_backward": "C"}
    passes_of_halves = {"dispatch", "combine"}, {"combine_backward", "dispatch_backward"}
    for of_half, passes in zip((issued[:half], issued[half:]), passes_of_halves, strict=True):
        assert {name for name, *_ in of_half} == passes
        assert [names[name] + group[0] for name, group, *_ in of_half] == expected


def test_experts_without_a_graph_leave_out_no_pass_of_backward() -> None:
    """On a rank whose experts return what depends on nothing, such as no rows at all."""
    case, layer = ("hierarchical_alltoall", "ep4"), Layer("hierarchical_alltoall", "ep4")
    with layer.recorder:
        layer.run(lambda rows, *_: torch.zeros_like(rows))
    assert order_of(layer.recorder) == order_of(recorded(*case)[0])


def test_memory_of_abandoned_passes_is_freed_behind_its_last_use() -> None:
    layer = Layer("hierarchical_alltoall", "ep4")

    def fail(*_: Any) -> torch.Tensor:
        raise ValueError("out of memory")

    with layer.recorder, pytest.raises(ValueError, match="out of memory"):
        layer.run(fail)
    assert layer.recorder.findings == []


def test_an_abandoned_pass_is_waited_for_after_a_failed_collective() -> None:
    """On the caller's stream, although another one is current, as in a finalizer."""
    recorder = Recorder()
    caller, other = recorder.current, RecordedStream(recorder, "other")
    current = []
    failed, pending = mock.Mock(), mock.Mock()
    failed.wait.side_effect = RuntimeError("NCCL error")
    pending.wait.side_effect = lambda: current.append(torch.cuda.current_stream())
    with recorder:
        streams = CudaStreams(torch.device("cuda"))
        torch.cuda.set_stream(other)
        streams.abandon({0: [failed], 3: [pending]})
        assert torch.cuda.current_stream() is other
    assert current == [caller]
