"""Streams, and the life of buffers, where experts compute between passes; see stream_recorder."""

from collections import Counter
from typing import Any

import pytest
import test_stream_safety
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
)

from monta_megatron.chains import CHAINS, Chain, TokenCounts
from monta_megatron.chains.lower import lower
from monta_megatron.chains.pipelined_layer import BoundLayer, blocks_of_chunks, layer_program
from monta_megatron.chains.program import (
    COMBINE,
    COMBINE_BACKWARD,
    DISPATCH,
    DISPATCH_BACKWARD,
    RowFormat,
)
from monta_megatron.core import Layout
from monta_megatron.exchange.buffers import Buffers
from monta_megatron.exchange.exchange import Exchange
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
            bound=chain.bind(layout, counts.of_blocks(*bounds), 1),
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
    monkeypatch.setattr(Buffers, "_reserve", lambda buffers, plan: None)
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


@pytest.mark.parametrize(("chain_name", "layout_name"), TOKEN_CASES)
def test_the_program_of_a_layer_is_what_is_issued(chain_name: str, layout_name: str) -> None:
    """The collectives of a layer's program are those that are issued, pass by pass and chunk."""
    issued = [
        (pass_name, stage)
        for pass_name, _, stage, _ in order_of(Record(chain_name, layout_name, 3).recorder)
    ]
    planned = []
    for layer in layers_of(chain_name, layout_name, 3):
        num_first = len(layer.layer.first.series)
        for operation in layer.program.operations:
            half = layer.layer.first if operation.series < num_first else layer.layer.second
            if operation.is_collective:
                messages = layer.program.buffers[operation.writes[0]].message_bytes(
                    layer.max_experts_per_token
                )
                planned += [(half.pass_.name, operation.stage)] * len(messages)
    assert issued == planned


def layers_of(chain_name: str, layout_name: str, num_chunks: int) -> list[BoundLayer]:
    """The programs of a layer in so many chunks, forward and backward."""
    chain, layout = CHAINS[chain_name], LAYOUTS[layout_name]
    counts, width = count(chain, layout, PLAIN.map(layout.num_experts))
    assert isinstance(counts, TokenCounts)
    chunks = tuple(
        chain.bind(layout, counts.of_blocks(*blocks), 1)
        for blocks in blocks_of_chunks(NUM_BLOCKS, num_chunks)
    )
    layers = []
    for passes in ((DISPATCH, COMBINE), (COMBINE_BACKWARD, DISPATCH_BACKWARD)):
        first, second = (
            lower(
                chunks[0],
                pass_,
                RowFormat(
                    hidden_size=test_stream_safety.HIDDEN,
                    value_bytes=4,
                    prob_bytes=4 * pass_.probs,
                    sum_bytes=4,
                ),
                width,
            )
            for pass_ in passes
        )
        layers.append(
            BoundLayer(
                layer=layer_program(first.program, second.program, num_chunks),
                max_experts_per_token=width,
                chunks=chunks,
            )
        )
    return layers
