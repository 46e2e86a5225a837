"""Record what one rank receives in an exchange of many, and replay it in a single process.

Record: 16 CPU ranks run the four passes of a case over Gloo, and rank 0 keeps the columns that each
of its collectives sent and received, and what the passes returned.

Replay: one process runs rank 0's passes again. In place of a collective, a stream of its group
waits for the caller's, clears the output, sleeps a random time, compares what is sent with the
record, writes what was received, and overwrites the input if no later operation reads it. So a
missing wait, or memory that is used again too early, gives other values: in what is sent, or in
what a pass returns. The rows are random bits, which no two places share.

The same replay runs on the CPU, under a `Recorder`, which finds faults by the order of accesses,
and on a GPU. It covers all of the device's side but NCCL itself. No pytest, no
Megatron.

Notation: N = rows of a message, C = chunks.
"""

import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

from exchanges import Case, Source, make_data, make_source
from fake_world import chunks_of, groups_of

from monta_megatron.chains import CHAINS, TokenCounts, lower
from monta_megatron.chains.program import Operation, Program, Release
from monta_megatron.exchange import executor, operations
from monta_megatron.exchange.buffers import Buffers
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.monitor import Step
from monta_megatron.exchange.pipeline import run_pipeline
from monta_megatron.exchange.streams import CudaStreams, _side_streams

NUM_RANKS = 16
RANKS_PER_NODE = 8
# Uneven, and one rank without tokens; enough for blocks of 4 chunks.
TOKENS = (24, 17, 0, 9)
NUM_BLOCKS = 12
HIDDEN = 32
NUM_CHUNKS = (1, 2, 3, 4)
# A GPU's cycles, up to 0.1 ms: longer than the host takes for the operations that follow.
MOST_CYCLES = 200_000
LIMIT_S = 300

# (place among the exchanges of the case, pass, stage, chunk) -> (sent columns, received columns)
Messages: TypeAlias = dict[tuple[int, str, str, int], tuple[list[torch.Tensor], list[torch.Tensor]]]


class ReplayCase(NamedTuple):
    """What is recorded together.

    Attributes:
        case: the exchange and its data.
        pipelined: experts run in the pipeline, so that every chunk is an exchange of its own.
    """

    case: Case
    pipelined: bool = False

    def __str__(self) -> str:
        case = self.case
        kind = ", experts in the pipeline" * self.pipelined
        return f"{case.chain} x{case.num_chunks}, EP {case.ep} x ETP {case.etp}{kind}"


class Recorded(NamedTuple):
    """One case, as rank 0 saw it.

    Attributes:
        messages: of its collectives.
        results: what the passes returned, by name.
    """

    messages: Messages
    results: dict[str, torch.Tensor]


def replay_cases() -> list[ReplayCase]:
    """All chains on all shapes that they take, in 1 to 4 chunks; pipelined experts."""
    made = []
    for chain, (ep, etp) in product(CHAINS.values(), ((NUM_RANKS, 1), (NUM_RANKS // 2, 2))):
        case = Case(
            chain=chain.name,
            ep=ep,
            etp=etp,
            ranks_per_node=RANKS_PER_NODE,
            topk=4,
            tokens=TOKENS,
            hidden=HIDDEN,
            dtype="bfloat16",
            num_blocks=NUM_BLOCKS,
        )
        if chain.incompatibility(case.layout(0)) is not None:
            continue
        chunks = NUM_CHUNKS[:1] if chain.serial else NUM_CHUNKS
        made += [ReplayCase(replace(case, num_chunks=number)) for number in chunks]
        if chain.rows == "tokens":
            made += [
                ReplayCase(replace(case, num_chunks=number), pipelined=True)
                for number in NUM_CHUNKS
            ]
    return made


def record(cases: Sequence[ReplayCase]) -> list[Recorded]:
    """Run the cases on forked CPU ranks; called before this process has made threads or groups.

    Raises:
        RuntimeError: a rank failed; its own error is on standard error.
    """
    fork = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record.pt")
        ranks = [
            fork.Process(target=_record_rank, args=(rank, folder, path, cases), daemon=True)
            for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LIMIT_S)
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
        for process in ranks:
            process.kill()
        if failed:
            raise RuntimeError(f"recording failed or took over {LIMIT_S} s on ranks {failed}")
        return read_records(path)


def read_records(path: Path) -> list[Recorded]:
    """The records that a file holds."""
    return [Recorded(*each) for each in torch.load(path, weights_only=True)]


def write_records(path: Path, records: Sequence[Recorded]) -> None:
    """Write records to a file: tensors, numbers and texts alone."""
    torch.save([tuple(each) for each in records], path)


def _record_rank(rank: int, folder: str, path: Path, cases: Sequence[ReplayCase]) -> None:
    from monta_megatron.emulation import gloo_collectives

    torch.set_num_threads(1)
    gloo_collectives.install()
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    records = []
    for each in cases:
        layer = Layer.of(each)
        messages: Messages = {}
        with in_place_of_start(_recorder(layer, messages)):
            results = layer.run()
        records.append(Recorded(messages, results))
    if rank == 0:
        write_records(path, records)
    dist.barrier()


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One rank's passes of a case.

    Attributes:
        exchanges: one, or one for each chunk where experts are in the pipeline.
        pipelined: whether they are.
        source: the tokens' side of it.
        inputs: token rows, expert rows, gradients of the experts' probabilities, gradients of the
            output.
    """

    exchanges: tuple[Exchange, ...]
    pipelined: bool
    source: Source
    inputs: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls,
        each: ReplayCase,
        device: str | torch.device = "cpu",
        fused: bool = False,
        **monitor: Any,
    ) -> "Layer":
        """The layer of this rank; of rank 0 of a world that is not there, without process groups.

        Args:
            each: the case.
            device: where its tensors are.
            fused: whether Triton kernels do the work.
            monitor: `monitor`, of the exchanges.
        """
        case = each.case
        data, place = make_data(case), None
        if not dist.is_initialized():
            place = 0, groups_of(case.layout(0))
        source = make_source(case, data, place)
        settings = {"fused": fused, **monitor}
        # `shared` holds tensors of a device.
        exchanges = [replace(source.exchange, shared={}, **settings)]
        if each.pipelined:
            assert isinstance(source.counts, TokenCounts), "rows are permuted tokens"
            exchanges = chunks_of(exchanges[0], source.counts, case.num_chunks)
        rank = source.rank
        inputs = (
            source.rows(data.tokens[rank]),
            data.expert_rows[rank],
            data.expert_probs[rank],
            source.rows(data.gradients[rank]),
        )
        return cls(
            exchanges=tuple(exchanges),
            pipelined=each.pipelined,
            source=replace(
                source,
                ids=None if source.ids is None else source.ids.to(device),
                probs=source.probs.to(device),
            ),
            inputs=tuple(one.to(device) for one in inputs),
        )

    def run(self) -> dict[str, torch.Tensor]:
        """All four passes, through autograd, with work of the caller's stream around them."""
        tokens, expert_rows, expert_probs, gradients = self.inputs
        rows = tokens.clone().requires_grad_()
        probs = self.source.probs.clone().requires_grad_()
        if self.pipelined:
            assert self.source.ids is not None
            output = run_pipeline(
                self.exchanges, rows * 1, probs * 1, self.source.ids, _Experts.apply
            )
            (output * 1).backward(gradients)
            return _detached(output=output, token_gradient=rows.grad, prob_gradient=probs.grad)
        (exchange,) = self.exchanges
        arrived, arrived_probs = dispatch(exchange, rows * 1, probs * 1, self.source.ids)
        torch.autograd.backward([arrived * 1, arrived_probs * 1], [expert_rows, expert_probs])
        outputs = expert_rows.clone().requires_grad_()
        combined = combine(exchange, outputs * 1)
        (combined * 1).backward(gradients)
        return _detached(
            expert_rows=arrived,
            expert_probs=arrived_probs,
            token_gradient=rows.grad,
            prob_gradient=probs.grad,
            output=combined,
            expert_gradient=outputs.grad,
        )


class _Experts(torch.autograd.Function):
    """Experts whose values and gradients are exact on every device; not each other's derivative."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        ctx.dtype = probs.dtype
        return rows * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        return gradient * 2, None, gradient[:, 0].to(ctx.dtype)


def _detached(**results: torch.Tensor | None) -> dict[str, torch.Tensor]:
    assert all(one is not None for one in results.values()), "a pass gave no gradient"
    return {name: one.detach() for name, one in results.items() if one is not None}


Start: TypeAlias = Callable[[Callable[..., Any], Buffers, Operation, Callable[..., Any]], list[Any]]


@contextmanager
def in_place_of_start(start: Start) -> Iterator[None]:
    """Context in which collectives are started by this: (usual start, its arguments) -> works."""
    usual = operations._start
    with mock.patch.object(
        operations, "_start", lambda buffers, operation, how: start(usual, buffers, operation, how)
    ):
        yield


def key_of(layer: Layer, buffers: Buffers, operation: Operation) -> tuple[int, str, str, int]:
    place = next(n for n, one in enumerate(layer.exchanges) if one is buffers.exchange)
    return place, buffers.pass_name, operation.stage, operation.chunk


def _sent(buffers: Buffers, operation: Operation) -> list[torch.Tensor]:
    """The columns of its message."""
    number = operation.reads[0]
    columns = buffers.columns(number) if number else buffers.source(operation)
    return columns.tensors()


def received_by(buffers: Buffers, operation: Operation) -> list[torch.Tensor]:
    buffers.messages(operation.writes[0])
    return buffers.columns(operation.writes[0]).tensors()


class _RecordedWork:
    """A collective whose output is kept once it has been waited for."""

    def __init__(self, work: dist.Work, keep: Callable[[], None]) -> None:
        self._work, self._keep = work, keep

    def wait(self) -> None:
        self._work.wait()
        self._keep()


def _recorder(layer: Layer, messages: Messages) -> Start:
    """Start collectives as usual, and keep what they send and receive."""

    def start(usual: Any, buffers: Buffers, operation: Operation, how: Any) -> list[Any]:
        sent = [one.clone() for one in _sent(buffers, operation)]
        works = usual(buffers, operation, how)
        received = received_by(buffers, operation)

        def keep() -> None:
            messages[key_of(layer, buffers, operation)] = sent, [one.clone() for one in received]

        return [*works[:-1], _RecordedWork(works[-1], keep)]

    return start


class StandIn:
    """Collectives of a device, of which each group has a stream; see above.

    Attributes:
        differences: by collective, how many bytes it sent that the record has not; on the device.
    """

    def __init__(
        self, layer: Layer, device: torch.device, messages: Messages | None = None, seed: int = 0
    ) -> None:
        self.differences: dict[tuple[int, str, str, int], torch.Tensor] = {}
        self._layer = layer
        self._device = device
        self._messages = {
            key: tuple([one.to(device) for one in columns] for columns in message)
            for key, message in (messages or {}).items()
        }
        self._random = random.Random(seed)
        # By group; of another pool than the executor's, as NCCL's may be.
        self._streams: dict[str, torch.cuda.Stream] = defaultdict(
            lambda: torch.cuda.Stream(device, priority=-1)
        )

    def start(self, usual: Any, buffers: Buffers, operation: Operation, how: Any) -> list[Any]:
        """In place of a collective: what others wait for."""
        key = key_of(self._layer, buffers, operation)
        recorder = buffers.exchange.monitor.recorder
        if recorder is not None:
            recorder.note(Step("start", buffers.pass_name, operation))
        expected, arriving = self._messages[key]
        sent, received = _sent(buffers, operation), received_by(buffers, operation)
        # What the caller owns, or a later operation reads, stays.
        buffer = buffers.bound.program.buffers[operation.reads[0]]
        is_last = buffer.release is not Release.CALLER and buffer.last_read == operation.number

        def run() -> None:
            _poison(received)
            torch.cuda._sleep(self._random.randrange(MOST_CYCLES))
            differing = [_num_differing(*pair) for pair in zip(sent, expected, strict=True)]
            self.differences[key] = torch.stack(differing).sum()
            for into, columns in zip(received, arriving, strict=True):
                into.copy_(columns)
            if is_last:
                _poison(sent)

        assert operation.group is not None, f"{operation.kind} is no collective"
        return self.on_stream(operation.group, run)

    def on_stream(self, group: str, run: Callable[[], None]) -> list[Any]:
        """Run something on the stream of a group, as NCCL orders a collective."""
        return [order_on(self._streams[group], self._device, run)]


def _poison(columns: list[torch.Tensor]) -> None:
    for column in columns:
        column.fill_(float("nan") if column.is_floating_point() else 127)


class StandInWork:
    """In place of `torch.distributed.Work`; like NCCL's it holds no tensors."""

    def __init__(self, end: torch.cuda.Event, device: torch.device) -> None:
        self._end, self._device = end, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._end)

    def get_future_result(self) -> Any:
        raise RuntimeError("a stand-in has no watchdog")


def order_on(
    stream: torch.cuda.Stream, device: torch.device, run: Callable[[], object]
) -> StandInWork:
    """Run something on a stream, behind what the current one was given so far."""
    stream.wait_event(torch.cuda.current_stream(device).record_event())
    with torch.cuda.stream(stream):
        run()
        return StandInWork(stream.record_event(), device)


def _num_differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of values, how many have other bits."""
    assert one.shape == other.shape and one.dtype == other.dtype, "another message"
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return (one.view(bits) != other.view(bits)).sum()


class Replay:
    """A case that runs again, from its record.

    Args:
        each: the case.
        recorded: its record.
        device: where its tensors are; the CPU by default.
        fused: whether Triton kernels do the work.
        seed: of the times that collectives take.
        monitor: `monitor`, of the exchanges.
    """

    def __init__(
        self,
        each: ReplayCase,
        recorded: Recorded,
        device: torch.device | None = None,
        fused: bool = False,
        seed: int = 0,
        **monitor: Any,
    ) -> None:
        device = device or torch.device("cpu")
        self._each, self._recorded = each, recorded
        self._layer = Layer.of(each, device, fused, **monitor)
        self._collectives = StandIn(self._layer, device, recorded.messages, seed)
        self._results: dict[str, torch.Tensor] = {}

    def run(self) -> None:
        """Issue all passes; nothing waits for the device."""
        with in_place_of_start(self._collectives.start):
            self._results = self._layer.run()

    def differences(self) -> list[str]:
        """What differs from the record, a line each."""
        each, sent = self._each, self._collectives.differences
        lines = [
            f"{each}: {pass_name}, {stage}, chunk {chunk}"
            f"{f' of exchange {place}' * each.pipelined}: {int(number)} values sent differ"
            for (place, pass_name, stage, chunk), number in sent.items()
            if int(number)
        ]
        missing = self._recorded.messages.keys() - sent.keys()
        lines += [f"{each}: {key}: was not sent" for key in sorted(missing)]
        for name, expected in self._recorded.results.items():
            if number := int(_num_differing(self._results[name].cpu(), expected)):
                lines.append(f"{each}: {name}: {number} of {expected.numel()} values differ")
        return lines


@contextmanager
def _other_programs(change: Callable[[Program], Program]) -> Iterator[None]:
    """Context in which programs are changed after they have been made."""
    made = lower._structure
    with mock.patch.object(lower, "_structure", lambda *structure: change(made(*structure))):
        yield


def _with_waits(program: Program, waits: Callable[[Operation], Iterable[int]]) -> Program:
    changed = (each._replace(waits=tuple(waits(each))) for each in program.operations)
    return replace(program, operations=tuple(changed))


def _no_waits_of_collectives(program: Program) -> Program:
    return _with_waits(program, lambda each: () if each.is_collective else each.waits)


def _no_waits_for_collectives(program: Program) -> Program:
    started = {each.number for each in program.operations if each.is_collective}
    changed = _with_waits(program, lambda each: [one for one in each.waits if one not in started])
    at_end = tuple(number for number in program.waits_at_end if number not in started)
    return replace(changed, waits_at_end=at_end)


def _reused_early(program: Program, is_sent: bool) -> Program:
    """A program without the waits for memory that a collective before has sent or received."""
    slots: dict[int, list[int]] = {}
    left_out: dict[int, set[int]] = {}
    for operation in program.operations:
        for number in operation.writes:
            before = slots.setdefault(program.buffers[number].slot, [])
            readers = [
                each
                for each in program.operations
                if not set(before).isdisjoint(each.reads)
                and (each if is_sent else operation).is_collective
            ]
            left_out.setdefault(operation.number, set()).update(each.number for each in readers)
            before.append(number)
    return _with_waits(
        program, lambda each: [one for one in each.waits if one not in left_out[each.number]]
    )


@contextmanager
def _streams(made: type[CudaStreams]) -> Iterator[None]:
    with mock.patch.object(executor, "streams_for", made):
        yield


class _NoForkInBackward(CudaStreams):
    def fork(self, num_streams: int) -> None:
        if torch._C._current_graph_task_id() < 0:  # in no backward pass
            super().fork(num_streams)
        else:
            self._streams = _side_streams(self._device, self._caller, num_streams)


@contextmanager
def _poisoned_early() -> Iterator[None]:
    """Context in which the caller overwrites what it sends once the collective was started."""
    usual_start = StandIn.start

    def start(
        stand_in: StandIn, usual: Any, buffers: Buffers, operation: Operation, how: Any
    ) -> Any:
        works = usual_start(stand_in, usual, buffers, operation, how)
        _poison(_sent(buffers, operation))
        return works

    with mock.patch.object(StandIn, "start", start):
        yield


# None is sound.
FAULTS: Mapping[str | None, Callable[[], AbstractContextManager[Any]]] = {
    None: nullcontext,
    "the wait before a collective left out": partial(_other_programs, _no_waits_of_collectives),
    "the wait after a collective left out": partial(_other_programs, _no_waits_for_collectives),
    "a send buffer reused early": partial(_other_programs, partial(_reused_early, is_sent=True)),
    "a receive buffer reused early": partial(
        _other_programs, partial(_reused_early, is_sent=False)
    ),
    "a stream not forked in a backward pass": partial(_streams, _NoForkInBackward),
    "a message poisoned before its end event": _poisoned_early,
}
