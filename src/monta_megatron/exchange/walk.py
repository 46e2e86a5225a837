"""The executor: walks a bound chain, forward or transposed, with its chunks in a pipeline.

One function serves all four walks of a layer:

    dispatch            chain       rows + probs, + ids where rows are tokens
    combine             transpose   rows
    dispatch backward   transpose   rows + probs
    combine backward    chain       rows

The order of issue is `chains.chain.order_of_issue`: chunk i+1's first collective has started before
chunk i's second one is waited for, in every walk. Collectives are issued in the same order on
every rank, whatever the data: a chunk without rows is still sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from monta_megatron.chains.chain import BoundChain
from monta_megatron.chains.lanes import Walk
from monta_megatron.chains.stages import (
    AllGather,
    AllToAll,
    BoundStage,
    Place,
    Replicate,
    Segments,
)
from monta_megatron.exchange.collectives import PeerGroup, start_all_gather, start_all_to_all
from monta_megatron.exchange.copies import Copies, find_copies, put_rows
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.payload import Lanes, OwnPart, Payload
from monta_megatron.exchange.streams import Ready, Streams, streams_for


class ExchangeError(RuntimeError):
    """A collective failed; the message names chain, stage, chunk and group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """One micro-batch's exchange, made before dispatch, kept for combine and both backward passes.

    Attributes:
        bound: the chain with this micro-batch's rows.
        groups: the process group for every group name of the chain.
        sum_dtype: dtype of the sums over copies of a row, at least fp32. Megatron reduces over the
            expert tensor parallel group in the dtype of the probabilities.
        monitor: counts bytes; tells its recorder, if it has one, what is issued.
        list_width: W, the longest list of experts of any token; 0 where rows are pairs.
        row_indices: for each `Place` of the chain that copies, the rows of each chunk in the whole
            tensor; made at first use, shared by all walks.
        copies: by `Replicate` and chunk, what is copied; found by dispatch, shared by all walks.
    """

    bound: BoundChain
    groups: Mapping[str, PeerGroup]
    sum_dtype: torch.dtype
    monitor: Monitor
    list_width: int = 0
    row_indices: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    copies: dict[tuple[str, int], Copies] = field(default_factory=dict)

    def rows_of(self, stage: BoundStage, device: torch.device) -> tuple[torch.Tensor, ...]:
        """[C] int64 [rows of chunk c]: where a `Place` finds or puts the rows of each chunk."""
        assert stage.segments is not None
        name = stage.stage.name
        if name not in self.row_indices:
            self.row_indices[name] = _row_indices(stage.segments, device)
        return self.row_indices[name]


def run(exchange: Exchange, walk: Walk, lanes: Lanes) -> Lanes:
    """Apply the chain, or its transpose, to all rows.

    Args:
        exchange: what moves.
        walk: the direction, and the name under which it is recorded.
        lanes: contiguous, on the source side, or on the experts' side for a transpose.

    Returns:
        The lanes on the other side, without ids. They share no memory with the input unless no
        stage of the chain moves anything (every group has one rank, one chunk, one local expert).

    Raises:
        ExchangeError: a collective failed or timed out.
    """
    bound, monitor = exchange.bound, exchange.monitor
    streams = streams_for(lanes.rows.device, len(bound.stages))
    pipeline = _Pipeline(exchange, walk, lanes, streams)

    streams.fork()
    depths = bound.depths(walk.transpose, streams.copies_block_host)
    for position, turn in bound.chain.order(depths, bound.num_chunks):
        chunk = bound.chunk(turn, walk.transpose)
        stage = pipeline.stages[position].stage.name
        with streams.on(position), monitor.range(walk.name, bound.chain.name, stage, chunk):
            pipeline.advance(position, chunk)
    streams.join()
    return pipeline.outputs


@dataclass(kw_only=True)
class _Chunk:
    """The state of a chunk between two stages.

    `sources` are held until the collective that reads them has been waited for. `rows` says which
    rows of the messages are the chunk's, if they were not copied out; None if all are. `own` stays
    on this rank unrounded, while its rounded copies cross the wire.
    """

    payload: Payload
    messages: list[torch.Tensor]
    ready: Ready
    waits_for: str | None = None
    num_copies: int = 1
    sources: list[torch.Tensor] = field(default_factory=list)
    rows: torch.Tensor | None = None
    own: OwnPart | None = None


@dataclass(frozen=True, kw_only=True)
class _Splits:
    """Row counts of a collective in a walk.

    Attributes:
        send: [C][P] rows to every peer.
        receive: [C][P] rows from every peer.
        sent_by_tier: tier -> [C] rows to other ranks.
    """

    send: list[list[int]]
    receive: list[list[int]]
    sent_by_tier: dict[str, list[int]]

    @classmethod
    def of(cls, stage: BoundStage, group: PeerGroup, transpose: bool) -> "_Splits":
        send, receive = stage.send, stage.receive
        if transpose:
            send, receive = receive, send
        return cls(
            send=send.tolist(),
            receive=receive.tolist(),
            sent_by_tier={
                tier: send[:, peers].sum(axis=1).tolist()
                for tier, peers in group.peers.items()
                if peers
            },
        )


class _Pipeline:
    """The state of one walk: its input, its output, and the chunks under way."""

    def __init__(self, exchange: Exchange, walk: Walk, lanes: Lanes, streams: Streams) -> None:
        bound = exchange.bound
        self.exchange = exchange
        self.walk = walk
        self.inputs = lanes
        self.streams = streams
        self.stages = bound.stages[::-1] if walk.transpose else bound.stages
        self.chunks: dict[int, _Chunk] = {}
        # Keyed by stage; made once for all chunks.
        self._payloads: dict[str, Payload] = {}
        self._splits: dict[str, _Splits] = {}
        self._outputs: Lanes | None = None

    @property
    def outputs(self) -> Lanes:
        """The lanes on the other side, complete once every chunk has been put there."""
        assert self._outputs is not None, "no chunk has reached the last stage"
        return self._outputs

    def _allocate_outputs(self) -> Lanes:
        bound, transpose = self.exchange.bound, self.walk.transpose
        num_rows = int(bound.num_source_rows if transpose else bound.num_expert_rows)
        rows = self.inputs.rows.new_empty(num_rows, self.inputs.rows.shape[1])
        if self.inputs.probs is None:
            return Lanes(rows=rows)
        has_lists = self.exchange.list_width > 0 and transpose
        shape = (num_rows, self.exchange.list_width) if has_lists else (num_rows,)
        return Lanes(rows=rows, probs=self.inputs.probs.new_empty(shape))

    def advance(self, position: int, chunk: int) -> None:
        """Stage `position` of the walk takes over `chunk` from the stage before it."""
        stage = self.stages[position]
        if position == len(self.stages) - 1:
            self._put(stage, chunk)
            return
        # A copy packs its lanes into one message if a collective comes next.
        packed = self.exchange.bound.packs and isinstance(
            self.stages[position + 1].stage, AllToAll | AllGather
        )
        if position == 0:
            self.chunks[chunk] = self._take(stage, chunk, packed)
        elif isinstance(stage.stage, Replicate):
            self.chunks[chunk] = self._replicate(stage, chunk, packed, self.stages[position + 1])
        else:
            assert not isinstance(stage.stage, Place), f"{stage.stage.name} stands in the middle"
            group = self.exchange.groups[stage.stage.group]
            if group.size > 1:
                self.chunks[chunk] = self._collective(stage, group, chunk)

    def _take(self, stage: BoundStage, chunk: int, packed: bool) -> _Chunk:
        """First `Place`: take the chunk's rows out of the whole tensor."""
        whole = self.inputs.tensors()
        if stage.segments is None:
            payload = Payload.of(whole, packed=False)
            return _Chunk(payload=payload, messages=whole, ready=lambda: None)
        if stage.segments.is_slice:
            slices = [lane[stage.segments.slice_of(chunk)] for lane in whole]
            payload = self._payload(stage, slices, packed=False)
            return _Chunk(payload=payload, messages=slices, ready=lambda: None)
        index = self._rows_of(stage, chunk)
        if isinstance(self.stages[1].stage, Replicate):
            # The sum reads each row once, so it can read it in place.
            payload = self._payload(stage, whole, packed=False)
            ready = self.streams.ready([])
            return _Chunk(payload=payload, messages=whole, ready=ready, rows=index)
        payload = self._payload(stage, whole, packed)
        messages = self._allocate(payload, index.shape[0])
        for into, lane in zip(payload.lanes(messages).tensors(), whole, strict=True):
            torch.index_select(lane, 0, index, out=into)
        return _Chunk(payload=payload, messages=messages, ready=self.streams.ready([]))

    def _put(self, stage: BoundStage, chunk: int) -> None:
        """Last `Place`: put the chunk's rows into the whole tensor."""
        lanes = self._wait(chunk)
        del self.chunks[chunk]
        if stage.segments is None:
            self._outputs = lanes
            return
        if self._outputs is None:
            # Not earlier: on CPU ranks the first chunk's earlier messages have been freed by now.
            with self.streams.on_caller():
                self._outputs = self._allocate_outputs()
        for into, lane in zip(self._outputs.tensors(), lanes.tensors(), strict=True):
            if stage.segments.is_slice:
                into[stage.segments.slice_of(chunk)].copy_(lane)
            else:
                put_rows(into, self._rows_of(stage, chunk), lane)

    def _rows_of(self, stage: BoundStage, chunk: int) -> torch.Tensor:
        index = self.exchange.rows_of(stage, self.inputs.rows.device)[chunk]
        self.streams.keep([index])
        return index

    def _replicate(self, stage: BoundStage, chunk: int, packed: bool, behind: BoundStage) -> _Chunk:
        """Copies for each part, or the sum of a row's copies, for the next stage (`behind`)."""
        assert isinstance(stage.stage, Replicate)
        lanes = self._wait(chunk)
        rows_here = self.chunks[chunk].rows
        if rows_here is not None:
            self.streams.keep([rows_here])
        key = (stage.stage.name, chunk)
        if key not in self.exchange.copies:
            assert lanes.ids is not None and stage.parts is not None
            num_copies = int(stage.receive[chunk].sum())
            self.exchange.copies[key] = find_copies(
                lanes.ids, stage.parts, num_copies, keep_lists=stage.stage.part != "expert"
            )
        copies = self.exchange.copies[key]
        self.streams.keep(copies.tensors())

        lists: list[torch.Tensor] = []
        if self.walk.transpose:
            sum_dtype = torch.promote_types(self.exchange.sum_dtype, lanes.rows.dtype)
            rows = copies.sum_by_row(lanes.rows, sum_dtype, rows_here)
            if lanes.probs is not None:
                shares = lanes.probs if rows_here is None else lanes.probs[rows_here]
                lists.append(copies.put_back(shares))
        else:
            rows = None
            if lanes.probs is not None:
                lists.append(copies.pick(lanes.probs, missing=0))
            if lanes.ids is not None and copies.keeps_lists:
                lists.append(copies.pick(lanes.ids, missing=self.exchange.bound.layout.num_experts))

        payload = self._payload(stage, [lanes.rows, *lists], packed)
        num_rows = copies.row.shape[0] if rows is None else rows.shape[0]
        messages = self._allocate(payload, num_rows)
        into = payload.lanes(messages).tensors()
        if rows is None:
            torch.index_select(lanes.rows, 0, copies.row, out=into[0])
        else:
            into[0].copy_(rows)
        for target, source in zip(into[1:], lists, strict=True):
            target.copy_(source)
        own = None
        if rows is not None and rows.dtype != lanes.rows.dtype:
            own = self._own_part(behind, chunk, rows)
        return _Chunk(payload=payload, messages=messages, ready=self.streams.ready([]), own=own)

    def _payload(self, stage: BoundStage, lanes: Sequence[torch.Tensor], packed: bool) -> Payload:
        """The layout of a stage's output."""
        name = stage.stage.name
        if name not in self._payloads:
            self._payloads[name] = Payload.of(lanes, packed)
        return self._payloads[name]

    def _own_part(self, behind: BoundStage, chunk: int, rows: torch.Tensor) -> OwnPart | None:
        """This rank's part of `rows` [parts of all ranks, H], added to what others send it."""
        if not isinstance(behind.stage, AllGather):
            return None
        group = self.exchange.groups[behind.stage.group]
        if group.size == 1:
            return None
        part = rows.split(behind.receive[chunk].tolist())[group.rank]
        (own,) = self._allocate(Payload.of([part], packed=False), part.shape[0])
        return OwnPart(rows=own.copy_(part), copy=group.rank)

    def _allocate(self, payload: Payload, num_rows: int) -> list[torch.Tensor]:
        """Messages for `num_rows` rows."""
        with self.streams.on_caller():
            messages = payload.allocate(num_rows)
        self.streams.hold(messages)
        return messages

    def _collective(self, stage: BoundStage, group: PeerGroup, chunk: int) -> _Chunk:
        """Start a collective on the output of the stage before it."""
        payload, messages = self._messages(chunk)
        before = self.chunks[chunk]
        transpose = self.walk.transpose
        name = stage.stage.name
        if name not in self._splits:
            self._splits[name] = _Splits.of(stage, group, transpose)
        splits = self._splits[name]
        send, receive = splits.send[chunk], splits.receive[chunk]
        gather = isinstance(stage.stage, AllGather)
        outputs = self._allocate(payload, sum(receive))
        works = []
        self.exchange.monitor.note("start", self.walk.name, stage.stage.name, chunk)
        try:
            for output, message in zip(outputs, messages, strict=True):
                if gather and not transpose:
                    works.append(start_all_gather(output, message, receive, group))
                else:
                    works.append(start_all_to_all(output, message, receive, send, group))
                row_bytes = message.shape[1:].numel() * message.itemsize
                for tier, num_rows in splits.sent_by_tier.items():
                    self.exchange.monitor.bytes_sent[name, tier] += num_rows[chunk] * row_bytes
        except RuntimeError as error:
            raise self._failure(stage.stage.name, chunk, error) from error
        works = self.exchange.monitor.watch(works, self.walk.name, stage.stage.name, chunk)
        return _Chunk(
            payload=payload,
            messages=outputs,
            ready=self.streams.ready(works),
            waits_for=stage.stage.name,
            num_copies=group.size if gather and transpose else 1,
            sources=messages,
            # If the messages were summed just now, that sum has already used it.
            own=before.own if before.num_copies == 1 else None,
        )

    def _wait(self, chunk: int) -> Lanes:
        """The chunk's lanes, once the stage before has filled them."""
        payload, messages = self._messages(chunk)
        return payload.lanes(messages)

    def _messages(self, chunk: int) -> tuple[Payload, list[torch.Tensor]]:
        """The chunk's messages, once the stage before has filled them, with copies summed."""
        state = self.chunks[chunk]
        if state.waits_for is not None:
            self.exchange.monitor.note("wait", self.walk.name, state.waits_for, chunk)
        try:
            state.ready()
        except RuntimeError as error:
            raise self._failure(str(state.waits_for), chunk, error) from error
        if state.waits_for is not None:
            self.exchange.monitor.note("ready", self.walk.name, state.waits_for, chunk)
        if state.num_copies == 1:
            return state.payload, state.messages
        num_rows = state.messages[0].shape[0] // state.num_copies
        total = self._allocate(state.payload, num_rows)
        state.payload.sum_of_copies(
            total,
            state.messages,
            state.num_copies,
            self.exchange.sum_dtype,
            state.own,
            self.exchange.bound.copies_per_sum(state.num_copies),
        )
        return state.payload, total

    def _failure(self, stage: str, chunk: int, error: Exception) -> ExchangeError:
        bound = self.exchange.bound
        group = next(
            (
                self.exchange.groups[entry.stage.group]
                for entry in self.stages
                if isinstance(entry.stage, AllToAll | AllGather) and entry.stage.name == stage
            ),
            None,
        )
        ranks = "" if group is None else f", group {group.name} (rank {group.rank} of {group.size})"
        return ExchangeError(
            f"{self.walk.name}: chain {bound.chain.name}, stage {stage}, "
            f"chunk {chunk + 1} of {bound.num_chunks}{ranks} failed: {error}"
        )


def _row_indices(segments: Segments, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Row numbers of every chunk from its runs; one copy to the device, and no sync.

    [C, N] runs -> per chunk [rows]: starts[c, 0], starts[c, 0] + 1, ..., starts[c, 1], ...
    """
    lengths = segments.lengths.ravel()
    total = int(lengths.sum())
    # A row is its run's start plus its distance from the run's first row in the result.
    shifts = segments.starts.ravel() - (np.cumsum(lengths) - lengths)
    runs = torch.from_numpy(np.stack([shifts, lengths]))
    if device.type == "cuda":
        runs = runs.pin_memory().to(device, non_blocking=True)
    shift_of_row = torch.repeat_interleave(runs[0], runs[1], output_size=total)
    rows = torch.arange(total, device=device) + shift_of_row
    return rows.split(segments.lengths.sum(axis=1).tolist())
