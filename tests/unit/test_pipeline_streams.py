"""Streams, and the life of buffers, where experts compute between passes; see stream_recorder."""

from collections import Counter
from typing import Any

import pytest
import torch
from stream_recorder import Recorder
from test_stream_safety import (
    CASES,
    LAYOUTS,
    NUM_BLOCKS,
    PLAIN,
    Routing,
    count,
    groups_of,
    make_exchange,
    make_inputs,
    order_of,
    pipelined_cases,
)

from monta_megatron.chains import CHAINS, Chain, TokenCounts
from monta_megatron.chains.pipelined_layer import blocks_of_chunks
from monta_megatron.core import Layout
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.memory import Memory
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.pipeline import run_pipeline

TOKEN_CASES = [(chain, layout) for chain, layout in CASES if CHAINS[chain].rows == "tokens"]


def scaled(rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Experts, which give memory back while passes are under way."""
    doubled = rows * 2
    return doubled * probs[:, None]


def exchanges_of(
    chain: Chain, layout: Layout, routing_map: torch.Tensor, num_chunks: int, monitor: Monitor
) -> list[Exchange]:
    """The exchanges of so many chunks of a micro-batch."""
    counts, width = count(chain, layout, routing_map)
    assert isinstance(counts, TokenCounts)
    return [
        Exchange(
            bound_chain=chain.bind(layout, counts.of_blocks(*bounds), 1),
            groups=groups_of(layout),
            sum_dtype=torch.float32,
            monitor=monitor,
            max_experts_per_token=width,
        )
        for bounds in blocks_of_chunks(NUM_BLOCKS, num_chunks)
    ]


class Record:
    """A layer in so many chunks, and what it issued.

    Attributes:
        recorder: what was issued to the device.
        under_way: for each call of the experts, and then for each of their backward passes: the
            passes with a collective that they do not wait for.
    """

    def __init__(
        self, chain_name: str, layout_name: str, num_chunks: int, routing: Routing = PLAIN
    ) -> None:
        chain, layout = CHAINS[chain_name], LAYOUTS[layout_name]
        routing_map = routing.map(layout.num_experts)
        self.recorder = recorder = Recorder()
        chunks = exchanges_of(chain, layout, routing_map, num_chunks, recorder.monitor)
        self.under_way: list[set[str]] = []

        def look(*_: Any) -> None:
            numbers: Counter[str] = Counter()
            passes = set()
            for entry in recorder.collectives():
                numbers[entry.stream] += 1
                if numbers[entry.stream] > recorder.current.clock.get(entry.stream, 0):
                    assert entry.step is not None
                    passes.add(entry.step.pass_name)
            self.under_way.append(passes)

        def experts(rows: torch.Tensor, _: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
            look()
            outputs = scaled(rows, probs)
            outputs.register_hook(look)
            return outputs

        with recorder:
            rows, probs, ids = make_inputs(
                make_exchange(chain, layout, routing_map, 1, recorder), routing_map
            )
            assert ids is not None
            output = run_pipeline(chunks, rows * 1, probs * 1, ids, experts)
            (output * 2).sum().backward()
            assert rows.grad is not None and probs.grad is not None
            _ = rows.grad + 1, probs.grad + 1
            del chunks, output, rows, probs, ids


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5])
@pytest.mark.parametrize(("chain_name", "layout_name"), TOKEN_CASES)
def test_every_access_is_ordered_and_memory_lives_long_enough(
    chain_name: str, layout_name: str, num_chunks: int
) -> None:
    recorder = Record(chain_name, layout_name, num_chunks).recorder
    assert recorder.findings == []
    assert not [owner for owner in recorder.owners_of_live_memory() if owner != "caller"]
    passes = {entry.step.pass_name for entry in recorder.collectives() if entry.step is not None}
    assert passes == {"dispatch", "combine", "combine_backward", "dispatch_backward"}


def test_memory_that_is_made_when_it_is_written_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Memory, "reserve", lambda memory: None)
    recorder = Record("hierarchical_alltoall", "ep4", 3).recorder
    assert {finding.kind for finding in recorder.findings} == {"reuse"}


@pytest.mark.parametrize(("chain_name", "layout_name"), TOKEN_CASES)
def test_a_chunk_is_computed_while_its_neighbours_travel(chain_name: str, layout_name: str) -> None:
    """The next one is dispatched, and the one before is combined; backward likewise."""
    assert Record(chain_name, layout_name, 3).under_way == [
        {"dispatch"},
        {"dispatch", "combine"},
        {"combine"},
        {"combine_backward"},
        {"combine_backward", "dispatch_backward"},
        {"dispatch_backward"},
    ]


@pytest.mark.parametrize(("chain_name", "layout_name"), TOKEN_CASES)
def test_collectives_are_issued_in_one_order_whatever_the_data(
    chain_name: str, layout_name: str
) -> None:
    expected = order_of(Record(chain_name, layout_name, 3).recorder)
    for routing in (
        Routing(num_tokens=0),
        Routing(num_tokens=2),
        Routing(num_tokens=23, one_expert=True),
    ):
        recorder = Record(chain_name, layout_name, 3, routing).recorder
        assert order_of(recorder) == expected, routing
        assert recorder.findings == [], routing


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
    [case for case in pipelined_cases() if CHAINS[case[0]].rows == "tokens"],
)
def test_order_of_collectives_by_hand(chain_name: str, layout_name: str) -> None:
    """Backward mirrors forward: combine's backward in place of dispatch."""
    issued = order_of(Record(chain_name, layout_name, 3).recorder)
    expected = [each for line in STEPS.split("\n") for each in line[:11].split()]
    half = len(expected)
    names = {"dispatch": "D", "combine": "C", "combine_backward": "D", "dispatch_backward": "C"}
    passes_of_halves = {"dispatch", "combine"}, {"combine_backward", "dispatch_backward"}
    for of_half, passes in zip((issued[:half], issued[half:]), passes_of_halves, strict=True):
        assert {name for name, *_ in of_half} == passes
        assert [names[name] + group[0] for name, group, *_ in of_half] == expected


def test_memory_of_abandoned_passes_is_freed_behind_its_last_use() -> None:
    chain, layout = CHAINS["hierarchical_alltoall"], LAYOUTS["ep4"]
    routing_map, recorder = PLAIN.map(layout.num_experts), Recorder()
    chunks = exchanges_of(chain, layout, routing_map, 3, recorder.monitor)

    def fail(*_: Any) -> torch.Tensor:
        raise ValueError("out of memory")

    with recorder:
        rows, probs, ids = make_inputs(
            make_exchange(chain, layout, routing_map, 1, recorder), routing_map
        )
        assert ids is not None
        with pytest.raises(ValueError, match="out of memory"):
            run_pipeline(chunks, rows * 1, probs * 1, ids, fail)
        del chunks, rows, probs, ids
    assert recorder.findings == []
