"""The layer whose experts are in the pipeline: the order of its steps, and its program. No torch.

A chunk consists of whole token blocks and is an exchange of its own. In step s

    first pass of chunk s starts | chunk s-1 is computed, its second starts | second of s-2 ends

Forward, the first pass is dispatch and the second one combine; backward, combine's backward and
dispatch's, in the same order over the chunks from the last to the first.

On a device a pass starts where the caller's stream stands, so the first pass of chunk c + 2 waits
for the experts of chunk c: its buffers may be memory that they have just given back, and so few
chunks are held at once. The network waits for it only where the experts of a chunk take longer than
what travels beside them. Before a second pass starts, what passes under way have left to issue is
issued; on the same side streams after it, it would wait for the experts, too.

Notation: C = number of chunks, B = number of token blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

from monta_megatron.chains.chain import BoundChain, order_of_issue
from monta_megatron.chains.program import (
    COLLECTIVES,
    BoundProgram,
    Buffer,
    Kind,
    Operation,
    Pass,
    Program,
    waits_of,
)

Step: TypeAlias = Literal[
    "start first", "end first", "start experts", "end experts", "start second", "end second"
]
STEPS: tuple[Step, ...] = get_args(Step)

# The caller's own stream, which no operation of a pass is issued on.
CALLER_STREAM = -1
FORWARD_LAYER = Pass(name="forward", transpose=False, probs=True, ids=True)
BACKWARD_LAYER = Pass(name="backward", transpose=True, probs=True)


def pipelined_steps(num_chunks: int, in_background: bool = False) -> list[tuple[Step, int]]:
    """(step, chunk) in the order of issue; the mirror image has the same order.

    Args:
        num_chunks: C.
        in_background: the experts compute beside the host, which would only wait for them if it
            went on with their chunk.
    """
    offsets = (0, 1, 1, 2, 2, 3) if in_background else (0, 1, 1, 1, 1, 2)
    return [(STEPS[at], chunk) for at, chunk in order_of_issue(offsets, num_chunks)]


def blocks_of_chunks(num_blocks: int, num_chunks: int) -> list[tuple[int, int]]:
    """[C] the first block of each chunk, and the one after its last."""
    return list(pairwise(num_blocks * chunk // num_chunks for chunk in range(num_chunks + 1)))


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerProgram:
    """One direction of a layer.

    Attributes:
        program: the passes of all chunks, and the operations of the experts.
        first: the first pass of a chunk; its operations have the same series here.
        second: the second pass, whose series come after that of the experts.
        lifetimes: [buffers] the first and the last operation while which each is held; None for
            what the pass is given.
    """

    program: Program
    first: Program
    second: Program
    lifetimes: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True, kw_only=True)
class BoundLayer:
    """One direction of a layer with the rows of its chunks on one rank.

    Attributes:
        layer: the structure.
        chunks: [C] each an exchange of its own.
        max_experts_per_token: see `BoundProgram`.
    """

    layer: LayerProgram
    chunks: tuple[BoundChain, ...]
    max_experts_per_token: int

    @property
    def program(self) -> Program:
        """The program of the direction."""
        return self.layer.program

    def of_chunk(self, chunk: int, program: Program) -> BoundProgram:
        """One of the two passes of a chunk."""
        return BoundProgram(
            program=program,
            bound=self.chunks[chunk],
            max_experts_per_token=self.max_experts_per_token,
        )

    def rows(self, buffer: Buffer) -> float:
        """Rows in a buffer, each of which belongs to a chunk."""
        assert buffer.chunk is not None, "the buffers of a chunk are numbered with it"
        return buffer.copies * self.chunks[buffer.chunk].rows_at[buffer.boundary][0]


@lru_cache(maxsize=256)
def layer_program(
    first: Program, second: Program, num_chunks: int, in_background: bool = False
) -> LayerProgram:
    """The program of one direction, from those of a chunk's two passes.

    Args:
        first: of one chunk.
        second: likewise, of the pass that follows the experts.
        num_chunks: C.
        in_background: see `pipelined_steps`.
    """
    layer = _Layer(first, second)
    turns = pipelined_steps(num_chunks, in_background)
    chunks = range(num_chunks)[:: 1 if first.pass_.ids else -1]
    for step, turn in turns:
        layer.add(step, chunks[turn])
    awaited: tuple[Kind, ...] = (*COLLECTIVES, "experts") if in_background else COLLECTIVES
    waits = waits_of(layer.operations, layer.needs, first.policy, awaited)
    # Beside the host, experts compute one chunk after the other.
    computed = [one.number for one in layer.operations if one.kind == "experts"]
    queued = dict(pairwise(reversed(computed))) if in_background else {}
    last = len(layer.operations) - 1
    program = Program(
        pass_=FORWARD_LAYER if first.pass_.ids else BACKWARD_LAYER,
        row=first.row,
        policy=first.policy,
        operations=tuple(
            one._replace(**waited._asdict())._replace(
                after=(queued[one.number],) if one.number in queued else waited.after
            )
            for one, waited in zip(layer.operations, waits, strict=True)
        ),
        buffers=tuple(layer.buffers),
        output=layer.output,
        waits_at_end=tuple(sorted(layer.joined)),
        num_streams=max(first.num_streams, second.num_streams),
        num_at_start=0,
    )
    return LayerProgram(
        program=program,
        first=first,
        second=second,
        lifetimes=tuple(
            None if born is None else (born, last if end is None else end)
            for born, end in zip(layer.born, layer.ends, strict=True)
        ),
    )


class _Layer:
    """The program under construction.

    Attributes:
        operations: without their waits.
        needs: of each, the operations that end before it.
        buffers: of all passes.
        born: of each buffer, since which operation it is held.
        ends: of each buffer, the last operation for which it is held; None while it is.
        joined: the operations that the caller's stream comes after.
        output: the buffer of the last chunk's result.
    """

    def __init__(self, first: Program, second: Program) -> None:
        self.operations: list[Operation] = []
        self.needs: list[set[int]] = []
        self.buffers: list[Buffer] = []
        self.born: list[int | None] = []
        self.ends: list[int | None] = []
        self.joined: set[int] = set()
        self.output = 0
        self._passes = {"first": first, "second": second}
        # By pass and chunk: the number of its first buffer, what its streams wait for at the fork,
        # and the numbers here of its operations.
        self._begun: dict[tuple[str, int], tuple[int, frozenset[int], list[int]]] = {}
        # Of them, those that have operations left to issue.
        self._under_way: list[tuple[str, int]] = []
        self._writers: dict[int, int] = {}
        # Chunk -> the buffer of its experts' outputs.
        self._computed: dict[int, int] = {}
        # Side stream -> its latest operation.
        self._latest: dict[int, int] = {}

    def add(self, step: Step, chunk: int) -> None:
        """Add the operations that one step of a chunk issues."""
        action, _, name = step.partition(" ")
        if name == "experts":
            if action == "start":
                self._compute(chunk)
            return
        program = self._passes[name]
        if action == "end":
            self._go_on(name, chunk)
            self._join(name, chunk)
            return
        if name == "second" and program.policy != "host":
            for under_way in list(self._under_way):
                self._go_on(*under_way)
        self._fork(name, chunk)
        self._issue(name, chunk, program.operations[: program.num_at_start])
        self._under_way.append((name, chunk))

    def _go_on(self, name: str, chunk: int) -> None:
        """Issue the rest of a pass, if that was not done before."""
        program = self._passes[name]
        if (name, chunk) in self._under_way:
            self._under_way.remove((name, chunk))
            self._issue(name, chunk, program.operations[program.num_at_start :])

    def _fork(self, name: str, chunk: int) -> None:
        """Begin a pass: its buffers, of which those that outlive an operation are made at once."""
        program, base, begin = self._passes[name], len(self.buffers), len(self.operations)
        self._begun[name, chunk] = base, frozenset(self.joined), []
        for buffer in program.buffers:
            is_reserved = buffer.release in ("join", "window") or buffer.number == program.output
            self.buffers.append(
                buffer._replace(
                    number=base + buffer.number, slot=base + buffer.slot, chunk=chunk, last_read=-1
                )
            )
            self.born.append(begin if is_reserved and buffer.number else None)
            self.ends.append(None)

    def _issue(self, name: str, chunk: int, operations: Sequence[Operation]) -> None:
        program, (base, forked, numbers) = self._passes[name], self._begun[name, chunk]
        for operation in operations:
            number = len(self.operations)
            numbers.append(number)
            reads, writes = (
                tuple(base + buffer for buffer in of) for of in (operation.reads, operation.writes)
            )
            series = operation.series
            if name == "second":
                series += len(self._passes["first"].series) + 1
                if 0 in operation.reads:
                    reads = tuple(self._computed[chunk] if one == base else one for one in reads)
            self.operations.append(
                operation._replace(
                    number=number, chunk=chunk, series=series, reads=reads, writes=writes
                )
            )
            written = {self._writers[buffer] for buffer in reads if buffer in self._writers}
            self.needs.append(written | forked)
            for buffer in writes:
                self._writers[buffer] = number
                if self.born[buffer] is None:
                    self.born[buffer] = number
            for buffer in (*operation.reads, *operation.writes):
                of_chunk = program.buffers[buffer]
                if of_chunk.release == "last read" and of_chunk.last_read in (-1, operation.number):
                    self.ends[base + buffer] = number
            if not operation.is_collective:
                self._latest[operation.stream] = number

    def _join(self, name: str, chunk: int) -> None:
        """End a pass: the caller comes after it, and its messages are given back."""
        program, (base, _, numbers) = self._passes[name], self._begun[name, chunk]
        last = len(self.operations) - 1
        self.joined.update(numbers[number] for number in program.waits_at_end)
        if program.policy != "host":
            self.joined.update(self._latest.values())
        for buffer in program.buffers:
            if buffer.release in ("join", "window"):
                self.ends[base + buffer.number] = last
        if name == "second":
            self.ends[self._computed[chunk]] = last
            self.output = base + program.output

    def _compute(self, chunk: int) -> None:
        """The experts of a chunk, on the caller's stream."""
        first, number = self._passes["first"], len(self.operations)
        (base, *_), outputs = self._begun["first", chunk], len(self.buffers)
        rows = self.buffers[base + first.output]
        of_second = self._passes["second"].buffers[0]
        self.buffers.append(
            of_second._replace(number=outputs, name="experts", chunk=chunk, slot=outputs)
        )
        self.born.append(number)
        self.ends.append(None)
        self._computed[chunk] = outputs
        # In the forward the experts keep their inputs.
        if not first.pass_.ids:
            self.ends[rows.number] = number
        data = {self._writers[rows.number]} if rows.number in self._writers else set()
        self._writers[outputs] = number
        self.operations.append(
            Operation(
                number=number,
                kind="experts",
                stage="experts",
                position=0,
                chunk=chunk,
                series=len(first.series),
                reads=(rows.number,),
                writes=(outputs,),
                resource="compute",
                group=None,
                stream=CALLER_STREAM,
                waits=(),
                after=(),
                launch_after=(),
                host="enqueues",
                parts_per_sum=0,
            )
        )
        self.needs.append(self.joined | data)
        # A host that computes itself goes on when it has; for a timer it waits where it reads.
        self.joined = set() if first.policy == "host" else {number}
