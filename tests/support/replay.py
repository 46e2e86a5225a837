"""Record what one rank receives in an exchange of many, and replay it in a single process.

Record: 16 CPU ranks run the four passes of a case over Gloo, and rank 0 keeps the messages that
each of its collectives sent and received, and what the passes returned.

Replay: one process runs rank 0's passes again. In place of a collective, a stream of its group
waits for the caller's, clears the output, sleeps a random time, compares what is sent with the
record, writes what was received, and overwrites the input if no later operation reads it. So a
missing wait, or memory that is used again too early, gives other values: in what is sent, or in
what a pass returns. The rows are random bits, which no two places share.

The same replay runs on the CPU, under a `Recorder`, which finds faults by the order of accesses,
and on a GPU. It covers all of the device's side but NCCL itself. No pytest, no
Megatron.

Notation: C = chunks.
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
from time_limits import scaled

from monta_megatron.chains import CHAINS, TokenCounts, lower
from monta_megatron.chains.program import Operation, Program, Release
from monta_megatron.exchange import executor, operations, streams
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

# Place among the exchanges of the case, pass, stage, chunk.
Key: TypeAlias = tuple[int, str, str, int]


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
        messages: of its collectives: sent, received.
        results: what the passes returned, by name.
    """

    messages: dict[Key, tuple[list[torch.Tensor], list[torch.Tensor]]]
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
        if chain.incompatibility(case.layout(0)) is None:
            in_chunks = [replace(case, num_chunks=number) for number in NUM_CHUNKS]
            made += [ReplayCase(each) for each in in_chunks[: 1 if chain.serial else None]]
            if chain.rows == "tokens":
                made += [ReplayCase(each, pipelined=True) for each in in_chunks]
    return made


def record(cases: Sequence[ReplayCase], path: Path) -> None:
    """Run the cases on forked CPU ranks and write the record of each, in order, to a file.

    Called before this process has made threads or groups.

    Raises:
        Exception: that of the first rank that failed, or multiprocessing's of a time limit.
    """
    with tempfile.TemporaryDirectory() as folder, get_context("fork").Pool(NUM_RANKS) as ranks:
        ended = ranks.imap_unordered(partial(_record_rank, folder, path, cases), range(NUM_RANKS))
        for _ in range(NUM_RANKS):
            ended.next(scaled(LIMIT_S))


def read_records(path: Path) -> list[Recorded]:
    """The records that a file holds."""
    return [Recorded(*each) for each in torch.load(path, weights_only=True)]


def _record_rank(folder: str, path: Path, cases: Sequence[ReplayCase], rank: int) -> None:
    from monta_megatron.emulation import gloo_collectives

    torch.set_num_threads(1)
    gloo_collectives.install()
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    records = [_recorded(each) for each in cases]
    if rank == 0:
        torch.save([tuple(each) for each in records], path)
    dist.barrier()


def _recorded(each: ReplayCase) -> Recorded:
    """The messages of a case as this rank sends and receives them."""
    layer, messages, usual = Layer.of(each), {}, operations._start

    def start(buffers: Buffers, operation: Operation, how: Any) -> list[Any]:
        sent = _copies(buffers.sent(operation))
        for work in usual(buffers, operation, how):
            work.wait()
        received = _copies(buffers.messages(operation.writes[0]))
        messages[layer.key_of(buffers, operation)] = sent, received
        return []

    with mock.patch.object(operations, "_start", start):
        return Recorded(messages, layer.run())


def _copies(messages: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [message.clone() for message in messages]


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
    def of(cls, each: ReplayCase, device: str | torch.device = "cpu", **settings: Any) -> "Layer":
        """The layer of this rank; of rank 0 of a world that is not there, without process groups.

        Args:
            each: the case.
            device: where its tensors are.
            settings: of the exchanges: `fused`, `monitor`.
        """
        case = each.case
        data, place = make_data(case), None
        if not dist.is_initialized():
            place = 0, groups_of(case.layout(0))
        source = make_source(case, data, place)
        # A copy has indices of its own, on this device.
        exchanges = [replace(source.exchange, **settings)]
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
        probs, ids = self.source.probs.clone().requires_grad_(), self.source.ids
        results: dict[str, Any] = {}
        if self.pipelined:
            assert ids is not None
            output = run_pipeline(self.exchanges, rows * 1, probs * 1, ids, _Experts.apply)
        else:
            (exchange,) = self.exchanges
            arrived, arrived_probs = dispatch(exchange, rows * 1, probs * 1, ids)
            torch.autograd.backward([arrived * 1, arrived_probs * 1], [expert_rows, expert_probs])
            outputs = expert_rows.clone().requires_grad_()
            output = combine(exchange, outputs * 1)
            results = {"expert_rows": arrived, "expert_probs": arrived_probs}
        (output * 1).backward(gradients)
        if not self.pipelined:
            results["expert_gradient"] = outputs.grad
        results |= {"output": output, "token_gradient": rows.grad, "prob_gradient": probs.grad}
        assert all(one is not None for one in results.values()), "a pass gave no gradient"
        return {name: one.detach() for name, one in results.items()}

    def key_of(self, buffers: Buffers, operation: Operation) -> Key:
        """Of a collective."""
        place = next(n for n, one in enumerate(self.exchanges) if one is buffers.exchange)
        return place, buffers.pass_name, operation.stage, operation.chunk


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


class Replay:
    """A case that runs again, from its record, with collectives of which each group has a stream.

    Args:
        each: the case.
        recorded: its record.
        device: where its tensors are; the CPU by default.
        seed: of the times that collectives take.
        settings: of the exchanges; see `Layer.of`.
    """

    def __init__(
        self,
        each: ReplayCase,
        recorded: Recorded,
        device: torch.device | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._each, self._recorded = each, recorded
        self._layer = Layer.of(each, self._device, **settings)
        self._messages = {
            key: tuple([one.to(self._device) for one in messages] for messages in both)
            for key, both in recorded.messages.items()
        }
        self._random = random.Random(seed)
        # By group; of another pool than the executor's, as NCCL's may be.
        self._streams: dict[str | None, torch.cuda.Stream] = defaultdict(
            lambda: torch.cuda.Stream(self._device, priority=-1)
        )
        # Of each collective, how many values it sent that the record has not; on the device.
        self._sent: dict[Key, torch.Tensor] = {}
        self._results: dict[str, torch.Tensor] = {}

    def run(self) -> None:
        """Issue all passes; nothing waits for the device."""
        # Its stand-ins for collectives may overlap.
        kept = mock.patch.object(streams, "communicators_overlap", lambda: True)
        with kept, mock.patch.object(operations, "_start", self.start):
            self._results = self._layer.run()

    def start(self, buffers: Buffers, operation: Operation, how: Any) -> list[Any]:
        """In place of a collective: what others wait for."""
        recorder = buffers.exchange.monitor.recorder
        if recorder is not None:
            recorder.note(Step("start", buffers.pass_name, operation))
        sent, received = buffers.sent(operation), buffers.messages(operation.writes[0])
        key = self._layer.key_of(buffers, operation)
        # What the caller owns, or a later operation reads, stays.
        buffer = buffers.bound.program.buffers[operation.reads[0]]
        is_last = buffer.release is not Release.CALLER and buffer.last_read == operation.number
        spent = buffers.columns(buffer.number).tensors() if is_last else []
        # Behind what the current stream was given so far.
        stream = self._streams[operation.group]
        stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(stream):
            self.deliver(key, sent, received, spent)
            return [StandInWork(stream.record_event())]

    def deliver(
        self,
        key: Key,
        sent: list[torch.Tensor],
        received: list[torch.Tensor],
        spent: list[torch.Tensor],
    ) -> None:
        """Compare what a collective sends with the record, bring what it received, overwrite."""
        expected, arriving = self._messages[key]
        _poison(received)
        torch.cuda._sleep(self._random.randrange(MOST_CYCLES))
        differing = [_num_differing(*pair) for pair in zip(sent, expected, strict=True)]
        self._sent[key] = torch.stack(differing).sum()
        for into, message in zip(received, arriving, strict=True):
            into.copy_(message)
        _poison(spent)

    def differences(self) -> list[str]:
        """What differs from the record, a line each."""
        lines = [
            f"{key}: {int(number)} values sent differ"
            for key, number in self._sent.items()
            if int(number)
        ]
        missing = self._recorded.messages.keys() - self._sent.keys()
        lines += [f"{key}: was not sent" for key in sorted(missing)]
        for name, expected in self._recorded.results.items():
            if number := int(_num_differing(self._results[name].cpu(), expected)):
                lines.append(f"{name}: {number} of {expected.numel()} values differ")
        return [f"{self._each}: {line}" for line in lines]


def _poison(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 127)


def _num_differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of values, how many have other bits."""
    assert one.shape == other.shape and one.dtype == other.dtype, "another message"
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return (one.view(bits) != other.view(bits)).sum()


class StandInWork(NamedTuple):
    """In place of `torch.distributed.Work`; like NCCL's it holds no tensors."""

    end: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.end)

    def get_future_result(self) -> Any:
        raise RuntimeError("a stand-in has no watchdog")


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
    left_out: dict[int, set[int]] = defaultdict(set)
    for operation in program.operations:
        for number in operation.writes:
            before = slots.setdefault(program.buffers[number].slot, [])
            left_out[operation.number] |= {
                each.number
                for each in program.operations
                if not set(before).isdisjoint(each.reads)
                and (each if is_sent else operation).is_collective
            }
            before.append(number)
    return _with_waits(
        program, lambda each: [one for one in each.waits if one not in left_out[each.number]]
    )


class _NoForkInBackward(CudaStreams):
    def fork(self, num_streams: int) -> None:
        if torch._C._current_graph_task_id() < 0:  # in no backward pass
            super().fork(num_streams)
        else:
            self._streams = _side_streams(self._device, self._caller, num_streams)


@contextmanager
def _poisoned_early() -> Iterator[None]:
    """Context in which the caller overwrites what it sends once the collective was started."""
    usual = Replay.start

    def start(replay: Replay, buffers: Buffers, operation: Operation, how: Any) -> list[Any]:
        works = usual(replay, buffers, operation, how)
        _poison(buffers.sent(operation))
        return works

    with mock.patch.object(Replay, "start", start):
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
    "a stream not forked in a backward pass": partial(
        mock.patch.object, executor, "streams_for", _NoForkInBackward
    ),
    "a message poisoned before its end event": _poisoned_early,
}
