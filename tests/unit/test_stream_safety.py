"""Streams, waits and the life of buffers, on every chain and pass, without a GPU.

A layer runs as one rank of a world in which all ranks have the same tokens; see stream_recorder.
"""

import dataclasses
import itertools
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from fake_world import bound_exchange, chunks_of
from stream_recorder import Entry, RecordedStream, Recorder, times_in_one_queue
from torch.profiler import ProfilerActivity, profile

from monta_megatron.chains import CHAINS, TokenCounts
from monta_megatron.chains import lower as lower_module
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import FORWARD_BACKWARD, Operation, Program, Release, RowFormat
from monta_megatron.core import Layout
from monta_megatron.exchange import operations
from monta_megatron.exchange import streams as streams_module
from monta_megatron.exchange.buffers import Buffers
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.pipeline import Experts, run_pipeline
from monta_megatron.exchange.rows import expert_ids_of
from monta_megatron.exchange.streams import CudaStreams, Ready

NUM_BLOCKS = 6
NUM_CHUNKS = (1, 2, 3, 5)
PASSES = {pass_.name for pass_ in FORWARD_BACKWARD}
# Two nodes of two ranks.
LAYOUTS = {
    name: Layout(ep=ep, etp=etp, num_local_experts=2, rank=1, nodes=(0, 0, 1, 1))
    for name, ep, etp in (("ep4", 4, 1), ("ep2_etp2", 2, 2))
}
CASES = [
    (chain.name, layout)
    for chain in CHAINS.values()
    for layout in LAYOUTS
    if chain.incompatibility(LAYOUTS[layout]) is None
]
TOKEN_CASES = [(chain, layout) for chain, layout in CASES if CHAINS[chain].rows == "tokens"]
# Those on which a chunk goes through two collectives.
TWO_COLLECTIVES = [
    ("alltoall_allgather", "ep2_etp2"),
    ("hierarchical_allgather", "ep4"),
    ("hierarchical_allgather", "ep2_etp2"),
    ("hierarchical_alltoall", "ep4"),
]
# Chain, layout, and whether experts are in the pipeline.
ALL_CASES = [*((*case, False) for case in CASES), *((*case, True) for case in TOKEN_CASES)]
each_case = pytest.mark.parametrize(("chain_name", "layout_name"), CASES)
in_the_pipeline_too = pytest.mark.parametrize(("chain_name", "layout_name", "pipelined"), ALL_CASES)


@dataclass
class Layer:
    """A layer's exchange on one rank of a world in which all ranks have the same tokens.

    Attributes:
        chain, layout: by name, or any layout.
        num_chunks: of the exchange, or of the pipeline.
        recorder: of what it issues.
        num_tokens, topk, one_expert: of each rank, to experts at random, or all to the first.
        hidden, dtype: of rows.
        fused: whether Triton kernels do the work.
        routing_map: [T, E] bool, instead.
        exchange, counts: bound to the counts of the map.
    """

    chain: str
    layout: str | Layout
    num_chunks: int = 3
    recorder: Recorder = field(default_factory=Recorder)
    num_tokens: int = 23
    topk: int = 3
    one_expert: bool = False
    hidden: int = 4
    dtype: torch.dtype = torch.float32
    fused: bool = False
    routing_map: torch.Tensor | None = None

    def __post_init__(self) -> None:
        layout = LAYOUTS[self.layout] if isinstance(self.layout, str) else self.layout
        if self.routing_map is None:
            shape = self.num_tokens, layout.num_experts
            scores = torch.rand(shape, generator=torch.manual_seed(0))
            if self.one_expert:
                scores[:, 0] = 2
            chosen = scores.topk(1 if self.one_expert else self.topk, dim=1).indices
            self.routing_map = torch.zeros(shape, dtype=torch.bool).scatter_(1, chosen, True)
        self.exchange, self.counts = bound_exchange(
            CHAINS[self.chain],
            layout,
            [self.routing_map],
            self.num_chunks,
            NUM_BLOCKS,
            monitor=self.recorder.monitor,
            fused=self.fused,
        )

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Rows, probabilities and, in an exchange of tokens, lists of experts."""
        num_rows = int(self.exchange.bound_chain.num_source_rows)
        generator = torch.Generator().manual_seed(1)
        probs, ids = torch.rand(num_rows, generator=generator), None
        if width := self.exchange.max_experts_per_token:
            of_map = torch.rand(self.routing_map.shape, generator=generator)
            probs, ids = expert_ids_of(self.routing_map, of_map, width)
        rows = torch.randn(num_rows, self.hidden, generator=generator).to(self.dtype)
        return rows.requires_grad_(), probs.requires_grad_(), ids

    def chunks(self) -> list[Exchange]:
        """An exchange of each chunk, for experts in the pipeline."""
        assert isinstance(self.counts, TokenCounts)
        return chunks_of(self.exchange, self.counts, self.num_chunks)

    def run(self, experts: Experts | None = None) -> list[torch.Tensor]:
        """All four passes, with work on the caller's stream before, between and after them.

        Args:
            experts: in the pipeline.

        Returns:
            Output and gradients.
        """
        rows, probs, ids = self.inputs()
        if experts is not None:
            assert ids is not None
            output = run_pipeline(self.chunks(), rows * 1, probs * 1, ids, experts)
        else:
            expert_rows, expert_probs = dispatch(self.exchange, rows * 1, probs * 1, ids)
            output = combine(self.exchange, expert_rows * expert_probs[:, None].to(self.dtype))
            del expert_rows, expert_probs
        gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        (output * 2).backward(gradient.to(output.dtype))
        assert rows.grad is not None and probs.grad is not None
        return [output.detach(), rows.grad + 1, probs.grad + 1]


def scaled(rows: torch.Tensor, _: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Experts in the pipeline, which give memory back while passes are under way."""
    doubled = rows * 2
    return doubled * probs[:, None]


def record(
    chain_name: str,
    layout: str | Layout,
    num_chunks: int,
    pipelined: bool = False,
    streams: type[CudaStreams] = CudaStreams,
    **fields: Any,
) -> Recorder:
    """What a layer issues to the device, up to the death of everything that it made."""
    recorder = Recorder(streams)
    layer = Layer(chain_name, layout, num_chunks, recorder, **fields)
    with recorder:
        layer.run(scaled if pipelined else None)
        del layer
    return recorder


# Recordings without a fault, shared by the tests.
sound = cache(record)


def kinds_of(recorder: Recorder) -> set[str]:
    """What was found."""
    return {finding.kind for finding in recorder.findings}


@pytest.mark.parametrize("num_chunks", NUM_CHUNKS)
@in_the_pipeline_too
def test_every_access_is_ordered_and_memory_lives_long_enough(
    chain_name: str, layout_name: str, pipelined: bool, num_chunks: int
) -> None:
    recorder = sound(chain_name, layout_name, num_chunks, pipelined)
    assert recorder.findings == []
    # Nothing is proved about memory that was not freed, or if nothing happened.
    assert recorder.owners_of_live_memory() <= {"caller"}
    assert {name for name, *_ in order_of(recorder)} == PASSES
    assert sum(entry.kind == "kernel" for entry in recorder.queue) > 20
    assert {stream.priority for stream in recorder.side_streams} == {-1}, "not the caller's"


class ForksEarly(CudaStreams):
    """Stages do not wait for what an allocation has issued on the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._before = self._caller.record_event()

    def fork(self, num_streams: int) -> None:
        with mock.patch.object(self._caller, "record_event", lambda: self._before):
            super().fork(num_streams)


class PreviousEvent(CudaStreams):
    """The consumer waits for the chunk before, and for nothing with the first one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.previous: dict[torch.cuda.Stream, Ready] = {}

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        wait = self.previous.get(self._current, lambda: None)
        self.previous[self._current] = super().ready(works)
        return wait


class NoFork(CudaStreams):
    def fork(self, num_streams: int) -> None:
        with mock.patch.object(RecordedStream, "wait_event"):
            super().fork(num_streams)


class NoJoin(CudaStreams):
    def join(self) -> None: ...


class NoKeep(CudaStreams):
    def keep(self, memory: torch.Tensor) -> None: ...


class AllocatesOnStages(CudaStreams):
    """Held until the join, but memory of a stage's stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        (stream,) = streams_module._side_streams(device, self._caller, 1)
        torch.cuda.set_stream(stream)

    def fork(self, num_streams: int) -> None:
        torch.cuda.set_stream(self._caller)
        super().fork(num_streams)


# Streams, chunks, whether allocations fill memory, what is found.
STREAMS: list[tuple[type[CudaStreams], int, bool, str | None]] = [
    (PreviousEvent, 3, False, "race"),
    (NoFork, 3, False, "race"),
    (NoJoin, 3, False, "race"),
    (AllocatesOnStages, 3, False, "reuse"),
    *((CudaStreams, num_chunks, True, None) for num_chunks in (1, 3)),
    *((ForksEarly, num_chunks, True, "race") for num_chunks in (1, 3)),
]


@pytest.mark.parametrize(("streams", "num_chunks", "fills", "kind"), STREAMS)
@each_case
def test_a_planted_fault_is_found(
    chain_name: str,
    layout_name: str,
    streams: type[CudaStreams],
    num_chunks: int,
    fills: bool,
    kind: str | None,
) -> None:
    torch.use_deterministic_algorithms(fills)
    try:
        found = kinds_of(record(chain_name, layout_name, num_chunks, streams=streams))
    finally:
        torch.use_deterministic_algorithms(False)
    assert kind in found if kind else not found


@each_case
def test_memory_given_back_before_the_join_is_found(chain_name: str, layout_name: str) -> None:
    program = lower_module._structure

    def released_at_last_read(*structure: Any) -> Program:
        made = program(*structure)
        buffers = (
            each if each.release is Release.CALLER else each._replace(release=Release.LAST_READ)
            for each in made.buffers
        )
        return dataclasses.replace(made, buffers=tuple(buffers))

    with mock.patch.object(lower_module, "_structure", released_at_last_read):
        assert "reuse" in kinds_of(record(chain_name, layout_name, 3))


@pytest.mark.parametrize("streams", [CudaStreams, NoKeep])
@each_case
def test_what_passes_share_is_kept(
    chain_name: str, layout_name: str, streams: type[CudaStreams]
) -> None:
    """Of the stream that called dispatch, for a combine that another stream calls later."""
    layer = Layer(chain_name, layout_name, recorder=Recorder(streams))
    recorder = layer.recorder
    other = RecordedStream(recorder, "other")
    with recorder, torch.no_grad():
        expert_rows, _ = dispatch(layer.exchange, *layer.inputs())
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            output = combine(layer.exchange, expert_rows)
        del layer
        recorder.find_freed()
        torch.cuda.current_stream().wait_stream(other)
        del expert_rows, output
    assert kinds_of(recorder) == ({"reuse"} if streams is NoKeep else set())


@pytest.mark.parametrize("first", range(4))
def test_side_streams_are_distinct(first: int) -> None:
    """From each other and from the caller's, of a pool whose streams are handed out in turn."""
    recorder, device = Recorder(), torch.device("cuda", 0)
    pool = [RecordedStream(recorder, f"pool {number}") for number in range(4)]
    turns = itertools.cycle(pool[first:] + pool[:first])
    streams_module._drawn.cache_clear()
    with mock.patch.object(torch.cuda, "Stream", lambda device, priority: next(turns)):
        for caller in (pool[1], pool[2], pool[1]):
            others = streams_module._side_streams(device, caller, 3)
            assert set(others) == set(pool) - {caller}
        # Passes with fewer streams share them, and a pool that has too few is no endless search.
        assert streams_module._side_streams(device, pool[1], 2) == others[:2]
        with pytest.raises(AssertionError, match="of 32 streams 3 are usable, not 4"):
            streams_module._side_streams(device, pool[1], 4)
    streams_module._drawn.cache_clear()


def order_of(recorder: Recorder) -> list[tuple[str, str, str, int]]:
    """(pass, group, stage, chunk) of every collective in the order of issue."""
    return [
        (entry.step.pass_name, entry.group, entry.step.operation.stage, entry.step.operation.chunk)
        for entry in recorder.collectives()
    ]


@pytest.mark.parametrize("num_chunks", [2, 5])
@in_the_pipeline_too
def test_collectives_are_issued_in_one_order_on_every_rank_whatever_the_data(
    chain_name: str, layout_name: str, pipelined: bool, num_chunks: int
) -> None:
    expected = order_of(sound(chain_name, layout_name, num_chunks, pipelined))
    layout = LAYOUTS[layout_name]
    # In the pipeline each chunk is an exchange of its own.
    num_issued = 1 if CHAINS[chain_name].serial or pipelined else num_chunks
    assert {chunk for *_, chunk in expected} == set(range(num_issued))
    for rank, tokens in (
        (1, {"num_tokens": 0}),
        (1, {"num_tokens": 2}),  # fewer tokens than chunks: some chunks have no rows
        # Ranks whose counts differ.
        *((rank, {"one_expert": True}) for rank in range(len(layout.nodes))),
    ):
        mine = dataclasses.replace(layout, rank=rank)
        recorder = record(chain_name, mine, num_chunks, pipelined, **tokens)
        assert (order_of(recorder), recorder.findings) == (expected, []), (rank, tokens)


@pytest.mark.parametrize("num_chunks", [1, 3])
@each_case
def test_as_many_messages_are_sent_as_are_priced(
    chain_name: str, layout_name: str, num_chunks: int
) -> None:
    recorder = sound(chain_name, layout_name, num_chunks)
    sent = Counter((pass_name, stage) for pass_name, _, stage, _ in order_of(recorder))
    layer = Layer(chain_name, layout_name, num_chunks)
    row = RowFormat(hidden_size=layer.hidden, value_bytes=4, prob_bytes=4, sum_bytes=4)
    priced: Counter[tuple[str, str]] = Counter()
    for way in FORWARD_BACKWARD:
        bound = lower(layer.exchange.bound_chain, way, row, layer.topk)
        for operation in bound.program.operations:
            if operation.is_collective:
                message = bound.program.buffers[operation.writes[0]]
                priced[way.name, operation.stage] += len(bound.message_bytes(message))
    assert sent == priced


@pytest.mark.parametrize("num_local_experts", [1, 2])
@each_case
def test_messages_are_contiguous_whatever_the_gradients(
    chain_name: str, layout_name: str, num_local_experts: int
) -> None:
    """NCCL takes no others, and the gradient of a sum is a single number, expanded."""
    layout = dataclasses.replace(LAYOUTS[layout_name], num_local_experts=num_local_experts)
    layer = Layer(chain_name, layout, 2, topk=2)
    with layer.recorder:
        expert_inputs = dispatch(layer.exchange, *layer.inputs())
        torch.autograd.backward([each.sum() for each in expert_inputs])
        outputs = torch.ones_like(expert_inputs[0], requires_grad=True)
        combine(layer.exchange, outputs).sum().backward()
    assert {name for name, *_ in order_of(layer.recorder)} == PASSES


def test_a_chunk_that_is_left_out_because_it_is_empty_is_found() -> None:
    def start_if_rows(buffers: Buffers, operation: Operation, *_: Any) -> list[Any]:
        if any(map(any, buffers.bound.splits(operation))):
            return start(buffers, operation)
        buffers.messages(operation.writes[0])
        return []

    start = operations.OPERATIONS["alltoall"]
    with_rows = {**operations.OPERATIONS, "alltoall": start_if_rows}
    expected = order_of(sound("hierarchical_alltoall", "ep4", 5))
    with mock.patch.object(operations, "OPERATIONS", with_rows):
        few = record("hierarchical_alltoall", "ep4", 5, num_tokens=2)
    assert order_of(few) != expected


def assert_overlap(recorder: Recorder, num_chunks: int) -> None:
    """The next chunk's first collective and a chunk's second one run at the same time.

    Transposed passes take the chunks from the last to the first.
    """
    times = times_in_one_queue(recorder.queue)
    # By pass, stage and chunk, from when to when its collectives run.
    spans: dict[tuple[str, str, int], tuple[float, float]] = {}
    for entry, (name, _, stage, chunk) in zip(
        recorder.collectives(), order_of(recorder), strict=True
    ):
        start, end = times[entry]
        spans[name, stage, chunk] = spans.get((name, stage, chunk), (start, end))[0], end
    for pass_ in FORWARD_BACKWARD:
        first, second = dict.fromkeys(stage for name, stage, _ in spans if name == pass_.name)
        chunks = list(range(num_chunks))[:: -1 if pass_.transpose else 1]
        for chunk, following in itertools.pairwise(chunks):
            start, end = spans[pass_.name, first, following]
            second_start, second_end = spans[pass_.name, second, chunk]
            assert start < second_end and second_start < end, (
                f"{pass_.name}, chunk {chunk}: {first} of the next chunk runs from {start:.3f} to "
                f"{end:.3f}, {second} from {second_start:.3f} to {second_end:.3f}: no overlap"
            )


@pytest.mark.parametrize("num_chunks", NUM_CHUNKS[1:])
@pytest.mark.parametrize("case", TWO_COLLECTIVES)
def test_collectives_overlap_in_one_launch_queue(case: tuple[str, str], num_chunks: int) -> None:
    assert_overlap(sound(*case, num_chunks), num_chunks)


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("case", TWO_COLLECTIVES)
def test_collectives_take_turns_unless_nccl_keeps_their_order(
    case: tuple[str, str], pipelined: bool
) -> None:
    """In a pass and across those in flight, so that their groups cannot wait for each other."""
    pipelined &= case in TOKEN_CASES
    kept, recorder = sound(*case, 3, pipelined), Recorder(is_order_kept=False)
    layer = Layer(*case, recorder=recorder)
    with recorder:
        layer.run(scaled if pipelined else None)
    assert recorder.findings == [] and all(recorder.in_turn) and not all(kept.in_turn)
    assert order_of(recorder) == order_of(kept)
    if not pipelined:
        with pytest.raises(AssertionError, match="no overlap"):
            assert_overlap(recorder, 3)
        # Copies go on beside them.
        times = times_in_one_queue(recorder.queue, of_stream=True)
        copies = [times[entry] for entry in recorder.queue if entry.kind == "kernel"]
        for stage, chunk in {of[2:] for of in order_of(recorder)}:
            spans = [
                times[entry]
                for entry, of in zip(recorder.collectives(), order_of(recorder), strict=True)
                if of[2:] == (stage, chunk)
            ]
            assert any(
                start < end and begin < stop for begin, end in spans for start, stop in copies
            )


def test_one_queue_hand_worked() -> None:
    # A collective, a wait for it on another stream, and a kernel of a third: the wait blocks it.
    send = Entry("collective", "group", "send")
    wait = Entry("wait", "stage", "wait", target=send)
    kernel = Entry("kernel", "other", "copy")
    assert times_in_one_queue([send, wait, kernel])[kernel][0] == 1
    assert times_in_one_queue([send, kernel, wait])[kernel][0] == 0


def test_launch_order_hand_worked() -> None:
    # The second collective of a group waits for its first one, until 1. A collective of another
    # group, issued behind it, need not, but in launch order it starts as the second one does. So
    # does one of a third group, issued behind that.
    first, second = Entry("collective", "rail", "send"), Entry("collective", "rail", "send")
    others = [Entry("collective", group, "reduce") for group in ("tp", "dp")]
    queue = [first, second, *others]
    for in_order, starts in ((False, [0, 1, 0, 0]), (True, [0, 1, 1, 1])):
        times = times_in_one_queue(queue, of_stream=True, in_launch_order=in_order)
        assert [times[entry][0] for entry in queue] == starts


def test_a_profile_has_a_range_for_every_stage_and_chunk() -> None:
    layer = Layer("alltoall_allgather", "ep2_etp2")
    with profile(activities=[ProfilerActivity.CPU]) as profiled, layer.recorder:
        layer.run()
    names = {event.name for event in profiled.events()}
    stages = ("pack", "alltoall", "allgather", "order")
    for pass_, stage, chunk in itertools.product(PASSES, stages, range(layer.num_chunks)):
        assert f"monta {pass_}: alltoall_allgather, {stage}, chunk {chunk}" in names
