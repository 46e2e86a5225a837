"""Streams, waits and the life of buffers, on every chain and pass, without a GPU.

A layer runs as one rank of a world in which all ranks have the same tokens; see stream_recorder.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from fake_world import bound_exchange, chunks_of
from stream_recorder import Entry, Finding, RecordedStream, Recorder, times_in_one_queue

from monta_megatron.chains import CHAINS, Chain, TokenCounts
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
from monta_megatron.exchange.streams import CudaStreams, Ready

NUM_LOCAL_EXPERTS = 2
HIDDEN = 4
DTYPE = torch.float32
NUM_BLOCKS = 6
NUM_CHUNKS = (1, 2, 3, 5)
PASSES = ("dispatch", "combine", "combine_backward", "dispatch_backward")
# Two nodes of two ranks.
LAYOUTS = {
    "ep4": Layout(ep=4, etp=1, num_local_experts=NUM_LOCAL_EXPERTS, rank=1, nodes=(0, 0, 1, 1)),
    "ep2_etp2": Layout(
        ep=2, etp=2, num_local_experts=NUM_LOCAL_EXPERTS, rank=1, nodes=(0, 0, 1, 1)
    ),
}
CASES = [
    (chain.name, layout)
    for chain in CHAINS.values()
    for layout in LAYOUTS
    if chain.incompatibility(LAYOUTS[layout]) is None
]
TOKEN_CASES = [(chain, layout) for chain, layout in CASES if CHAINS[chain].rows == "tokens"]
# Those on which a chunk goes through two collectives.
TWO_COLLECTIVES = {
    ("alltoall_allgather", "ep2_etp2"): ("alltoall", "allgather"),
    ("hierarchical_allgather", "ep4"): ("alltoall between nodes", "allgather in node"),
    ("hierarchical_allgather", "ep2_etp2"): ("alltoall between nodes", "allgather in node"),
    ("hierarchical_alltoall", "ep4"): ("alltoall between nodes", "alltoall in node"),
}
# Chain, layout, and whether experts are in the pipeline.
ALL_CASES = [*((*case, False) for case in CASES), *((*case, True) for case in TOKEN_CASES)]


@dataclass(frozen=True)
class Routing:
    """Which experts each token takes: [T, E] bool, the same on every rank."""

    num_tokens: int
    topk: int = 3
    one_expert: bool = False

    def map(self, num_experts: int) -> torch.Tensor:
        scores = torch.rand(self.num_tokens, num_experts, generator=torch.manual_seed(0))
        if self.one_expert:
            scores[:, 0] = 2
        chosen = scores.topk(1 if self.one_expert else self.topk, dim=1).indices
        return torch.zeros(self.num_tokens, num_experts, dtype=torch.bool).scatter_(1, chosen, True)


PLAIN = Routing(num_tokens=23)


def make_exchange(
    chain: Chain,
    layout: Layout,
    routing_map: torch.Tensor,
    num_chunks: int,
    recorder: Recorder,
    fused: bool = False,
) -> Exchange:
    settings = {"monitor": recorder.monitor, "fused": fused}
    exchange, _ = bound_exchange(chain, layout, [routing_map], num_chunks, NUM_BLOCKS, **settings)
    return exchange


def make_inputs(
    exchange: Exchange, routing_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows, probabilities and, in an exchange of tokens, lists of experts."""
    width = exchange.max_experts_per_token
    num_rows = int(exchange.bound_chain.num_source_rows)
    generator = torch.Generator().manual_seed(1)
    shape = (num_rows, width) if width else (num_rows,)
    probs = torch.rand(shape, generator=generator)
    ids = None
    if width:
        num_experts = exchange.bound_chain.layout.num_experts
        numbers = torch.arange(num_experts).expand_as(routing_map)
        numbers = torch.where(routing_map, numbers, num_experts)
        ids = numbers.sort(dim=1).values[:, :width].int()
    rows = torch.randn(num_rows, HIDDEN, generator=generator).to(DTYPE)
    return rows.requires_grad_(), probs.requires_grad_(), ids


def run_layer(exchange: Exchange, routing_map: torch.Tensor) -> list[torch.Tensor]:
    """All four passes, with work on the caller's stream before, between and after them."""
    rows, probs, ids = make_inputs(exchange, routing_map)
    expert_rows, expert_probs = dispatch(exchange, rows * 1, probs * 1, ids)
    output = combine(exchange, expert_rows * expert_probs[:, None].to(DTYPE))
    return finish(output, rows, probs)


def finish(output: torch.Tensor, rows: torch.Tensor, probs: torch.Tensor) -> list[torch.Tensor]:
    """Backward, and work on the gradients: output and gradients."""
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    (output * 2).backward(gradient.to(output.dtype))
    assert rows.grad is not None and probs.grad is not None
    return [output.detach(), rows.grad + 1, probs.grad + 1]


def scaled(rows: torch.Tensor, _: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Experts in the pipeline, which give memory back while passes are under way."""
    doubled = rows * 2
    return doubled * probs[:, None]


def run_pipelined(
    chain: Chain,
    layout: Layout,
    routing_map: torch.Tensor,
    num_chunks: int,
    recorder: Recorder,
    experts: Experts = scaled,
) -> None:
    """The same with the experts in the pipeline."""
    exchange, counts = bound_exchange(
        chain, layout, [routing_map], 1, NUM_BLOCKS, monitor=recorder.monitor
    )
    assert isinstance(counts, TokenCounts)
    rows, probs, ids = make_inputs(exchange, routing_map)
    assert ids is not None
    chunks = chunks_of(exchange, counts, num_chunks)
    finish(run_pipeline(chunks, rows * 1, probs * 1, ids, experts), rows, probs)


def record(
    chain_name: str,
    layout: Layout,
    num_chunks: int,
    routing: Routing = PLAIN,
    streams: type[CudaStreams] = CudaStreams,
    pipelined: bool = False,
) -> Recorder:
    """What a layer issues to the device, up to the death of everything that it made."""
    chain = CHAINS[chain_name]
    routing_map = routing.map(layout.num_experts)
    recorder = Recorder(streams)
    exchange = make_exchange(chain, layout, routing_map, num_chunks, recorder)
    with recorder:
        if pipelined:
            run_pipelined(chain, layout, routing_map, num_chunks, recorder)
        else:
            run_layer(exchange, routing_map)
        del exchange
    return recorder


@cache
def sound(chain_name: str, layout_name: str, num_chunks: int, pipelined: bool = False) -> Recorder:
    """The recording without a fault; shared by the tests."""
    return record(chain_name, LAYOUTS[layout_name], num_chunks, pipelined=pipelined)


@pytest.mark.parametrize("num_chunks", NUM_CHUNKS)
@pytest.mark.parametrize(("chain_name", "layout_name", "pipelined"), ALL_CASES)
def test_every_access_is_ordered_and_memory_lives_long_enough(
    chain_name: str, layout_name: str, pipelined: bool, num_chunks: int
) -> None:
    recorder = sound(chain_name, layout_name, num_chunks, pipelined)
    assert recorder.findings == []
    # Nothing is proved about memory that was not freed, or if nothing happened.
    assert not [owner for owner in recorder.owners_of_live_memory() if owner != "caller"]
    passes = {entry.step.pass_name for entry in recorder.collectives() if entry.step is not None}
    assert passes == set(PASSES)
    assert sum(entry.kind == "kernel" for entry in recorder.queue) > 20
    assert {stream.priority for stream in recorder.side_streams} == {-1}, "not the caller's"


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize(("chain_name", "layout_name"), CASES)
def test_fused_kernels_are_ordered_likewise(
    chain_name: str, layout_name: str, num_chunks: int
) -> None:
    """What they read and write; they do not run."""
    pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")
    from fake_kernels import recorded_launches

    chain, layout = CHAINS[chain_name], LAYOUTS[layout_name]
    routing_map, recorder = PLAIN.map(layout.num_experts), Recorder()
    exchange = make_exchange(chain, layout, routing_map, num_chunks, recorder, fused=True)
    with recorder, recorded_launches(recorder.kernel):
        run_layer(exchange, routing_map)
        del exchange
    assert recorder.findings == []
    launched = [each.name for each in recorder.queue if each.name.startswith("triton ")]
    assert (launched != []) == (chain.rows == "tokens" or layout.etp > 1)
    assert order_of(recorder) == order_of(sound(chain_name, layout_name, num_chunks))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class ForksEarly(CudaStreams):
    """Stages do not wait for what an allocation has issued on the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._before = self._caller.record_event()

    def fork(self, num_streams: int) -> None:
        with mock.patch.object(self._caller, "record_event", lambda: self._before):
            super().fork(num_streams)


@pytest.mark.parametrize(("streams", "kinds"), [(CudaStreams, set()), (ForksEarly, {"race"})])
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize(("chain_name", "layout_name"), CASES)
def test_allocations_that_fill(
    chain_name: str,
    layout_name: str,
    num_chunks: int,
    streams: type[CudaStreams],
    kinds: set[str],
    deterministic: None,
) -> None:
    findings = record(chain_name, LAYOUTS[layout_name], num_chunks, streams=streams).findings
    assert {finding.kind for finding in findings} == kinds


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


class WaitAtOnce(CudaStreams):
    """The stage's own stream waits for its collective as soon as that is launched."""

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        for work in works:
            work.wait()
        return super().ready(works)


@pytest.mark.parametrize(("chain_name", "layout_name"), CASES)
@pytest.mark.parametrize(
    ("streams", "kind"),
    [
        (PreviousEvent, "race"),
        (NoFork, "race"),
        (NoJoin, "race"),
        (AllocatesOnStages, "reuse"),
    ],
)
def test_a_planted_fault_is_found(
    streams: type[CudaStreams], kind: str, chain_name: str, layout_name: str
) -> None:
    findings: list[Finding] = record(chain_name, LAYOUTS[layout_name], 3, streams=streams).findings
    assert kind in {finding.kind for finding in findings}


@pytest.mark.parametrize(("chain_name", "layout_name"), CASES)
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
        findings = record(chain_name, LAYOUTS[layout_name], 3).findings
    assert "reuse" in {finding.kind for finding in findings}


@pytest.mark.parametrize("streams", [CudaStreams, NoKeep])
@pytest.mark.parametrize(("chain_name", "layout_name"), CASES)
def test_what_passes_share_is_kept(
    chain_name: str, layout_name: str, streams: type[CudaStreams]
) -> None:
    """Of the stream that called dispatch, for a combine that another stream calls later."""
    chain, layout = CHAINS[chain_name], LAYOUTS[layout_name]
    recorder = Recorder(streams)
    routing_map = PLAIN.map(layout.num_experts)
    exchange = make_exchange(chain, layout, routing_map, 3, recorder)
    other = RecordedStream(recorder, "other")
    with recorder, torch.no_grad():
        expert_rows, _ = dispatch(exchange, *make_inputs(exchange, routing_map))
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            output = combine(exchange, expert_rows)
        del exchange
        recorder.find_freed()
        torch.cuda.current_stream().wait_stream(other)
        del expert_rows, output
    kinds = {finding.kind for finding in recorder.findings}
    is_used = chain_name != "alltoall" or layout.num_local_experts > 1
    assert kinds == ({"reuse"} if streams is NoKeep and is_used else set())


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
        if entry.step is not None
    ]


@pytest.mark.parametrize("num_chunks", [2, 5])
@pytest.mark.parametrize(("chain_name", "layout_name", "pipelined"), ALL_CASES)
def test_collectives_are_issued_in_one_order_on_every_rank_whatever_the_data(
    chain_name: str, layout_name: str, pipelined: bool, num_chunks: int
) -> None:
    expected = order_of(sound(chain_name, layout_name, num_chunks, pipelined))
    layout = LAYOUTS[layout_name]
    # In the pipeline each chunk is an exchange of its own.
    num_issued = 1 if CHAINS[chain_name].serial or pipelined else num_chunks
    assert {chunk for *_, chunk in expected} == set(range(num_issued))
    for rank, routing in (
        (1, Routing(num_tokens=0)),
        (1, Routing(num_tokens=2)),  # fewer tokens than chunks: some chunks have no rows
        # Ranks whose counts differ.
        *((rank, Routing(num_tokens=23, one_expert=True)) for rank in range(len(layout.nodes))),
    ):
        mine = dataclasses.replace(layout, rank=rank)
        recorder = record(chain_name, mine, num_chunks, routing, pipelined=pipelined)
        assert order_of(recorder) == expected, (rank, routing)
        assert recorder.findings == [], (rank, routing)


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize(("chain_name", "layout_name"), CASES)
def test_as_many_messages_are_sent_as_are_priced(
    chain_name: str, layout_name: str, num_chunks: int
) -> None:
    recorder, layout = sound(chain_name, layout_name, num_chunks), LAYOUTS[layout_name]
    sent = Counter((pass_name, stage) for pass_name, _, stage, _ in order_of(recorder))
    routing_map = PLAIN.map(layout.num_experts)
    exchange = make_exchange(CHAINS[chain_name], layout, routing_map, num_chunks, recorder)
    row = RowFormat(hidden_size=HIDDEN, value_bytes=4, prob_bytes=4, sum_bytes=4)
    priced: Counter[tuple[str, str]] = Counter()
    for way in FORWARD_BACKWARD:
        bound = lower(exchange.bound_chain, way, row, PLAIN.topk)
        for operation in bound.program.operations:
            if operation.kind in ("alltoall", "allgather"):
                message = bound.program.buffers[operation.writes[0]]
                priced[way.name, operation.stage] += len(bound.message_bytes(message))
    assert sent == priced


@pytest.mark.parametrize("num_local_experts", [1, 2])
@pytest.mark.parametrize(("chain_name", "layout_name"), CASES)
def test_messages_are_contiguous_whatever_the_gradients(
    chain_name: str, layout_name: str, num_local_experts: int
) -> None:
    """NCCL takes no others, and the gradient of a sum is a single number, expanded."""
    layout = dataclasses.replace(LAYOUTS[layout_name], num_local_experts=num_local_experts)
    routing_map, recorder = Routing(num_tokens=23, topk=2).map(layout.num_experts), Recorder()
    exchange = make_exchange(CHAINS[chain_name], layout, routing_map, 2, recorder)
    with recorder:
        expert_inputs = dispatch(exchange, *make_inputs(exchange, routing_map))
        torch.autograd.backward([each.sum() for each in expert_inputs])
        outputs = torch.ones_like(expert_inputs[0], requires_grad=True)
        combine(exchange, outputs).sum().backward()
    assert {entry.step.pass_name for entry in recorder.collectives() if entry.step} == set(PASSES)


def test_a_chunk_that_is_left_out_because_it_is_empty_is_found() -> None:
    def start_if_rows(buffers: Buffers, operation: Operation, *_: Any) -> list[Any]:
        send, receive = buffers.bound.splits(operation)
        if any(send) or any(receive):
            return start(buffers, operation)
        buffers.messages(operation.writes[0])
        return []

    start = operations.OPERATIONS["alltoall"]
    with_rows = {**operations.OPERATIONS, "alltoall": start_if_rows}
    expected = order_of(sound("hierarchical_alltoall", "ep4", 5))
    with mock.patch.object(operations, "OPERATIONS", with_rows):
        few = record("hierarchical_alltoall", LAYOUTS["ep4"], 5, Routing(num_tokens=2))
    assert order_of(few) != expected


def spans(recorder: Recorder) -> dict[tuple[str, str, int], tuple[float, float]]:
    """(pass, stage, chunk) -> from when to when its collectives run, in one launch queue."""
    times = times_in_one_queue(recorder.queue)
    result: dict[tuple[str, str, int], tuple[float, float]] = {}
    for entry in recorder.collectives():
        assert entry.step is not None
        key = (entry.step.pass_name, entry.step.operation.stage, entry.step.operation.chunk)
        start, end = times[entry]
        result[key] = (min(start, result.get(key, (start, end))[0]), end)
    return result


def assert_overlap(recorder: Recorder, collectives: tuple[str, str], num_chunks: int) -> None:
    """The next chunk's first collective and a chunk's second one run at the same time.

    Transposed passes take the chunks from the last to the first.
    """
    times = spans(recorder)
    for name in PASSES:
        is_transposed = name in ("combine", "dispatch_backward")
        first, second = collectives[::-1] if is_transposed else collectives
        step = -1 if is_transposed else 1
        for chunk in range(num_chunks)[::step][:-1]:
            start, end = times[name, first, chunk + step]
            second_start, second_end = times[name, second, chunk]
            assert start < second_end and second_start < end, (
                f"{name}, chunk {chunk}: {first} of the next chunk runs from {start:.3f} to "
                f"{end:.3f}, {second} from {second_start:.3f} to {second_end:.3f}: no overlap"
            )


@pytest.mark.parametrize("num_chunks", NUM_CHUNKS[1:])
@pytest.mark.parametrize("case", TWO_COLLECTIVES)
def test_collectives_overlap_in_one_launch_queue(case: tuple[str, str], num_chunks: int) -> None:
    assert_overlap(sound(*case, num_chunks), TWO_COLLECTIVES[case], num_chunks)


@pytest.mark.parametrize("case", TWO_COLLECTIVES)
def test_a_wait_at_once_is_found_in_one_launch_queue(case: tuple[str, str]) -> None:
    recorder = record(case[0], LAYOUTS[case[1]], 3, streams=WaitAtOnce)
    assert recorder.findings == []
    with pytest.raises(AssertionError, match="no overlap"):
        assert_overlap(recorder, TWO_COLLECTIVES[case], 3)


def test_one_queue_hand_worked() -> None:
    # A collective, a wait for it on another stream, and a kernel of a third: the wait blocks it.
    send = Entry("collective", "group", "send")
    wait = Entry("wait", "stage", "wait", target=send)
    kernel = Entry("kernel", "other", "copy")
    assert times_in_one_queue([send, wait, kernel])[kernel][0] == 1
    assert times_in_one_queue([send, kernel, wait])[kernel][0] == 0
