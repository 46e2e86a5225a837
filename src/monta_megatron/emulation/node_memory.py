"""Messages between CPU ranks of one node, through memory that they share.

In a node of GPUs rows take a link of their own (NVLink), which does not load the processors. Gloo
uses TCP inside a node too: a message crosses the kernel twice, after a handshake between two Gloo
threads, and eight ranks on two cores are busy with that instead of the network between nodes.

Here a rank copies a message into memory that the other ranks of its node have mapped, and writes a
record into the pipe of each recipient, which copies the message out when it waits for it. So the
sender is done at once, and its tensor is not read later.

Ranks are on one node if they share a machine, a process namespace and a network namespace, and so
can map each other's memory. Nodes of an emulated cluster are network namespaces, joined by TCP.
"""

import ctypes
import fcntl
import functools
import mmap
import os
import secrets
import select
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Condition, Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from monta_megatron.common.nodes import BOOT_ID
from monta_megatron.common.torch_private import timeout_of

# torch's own, taken before `gloo_collectives` replaces it by a stand-in.
_all_gather = dist.all_gather

# In front of a block's data: one byte per reader, 1 until that rank has read the block. Groups of
# more ranks use Gloo.
_HEADER_BYTES = 64
_ALL_READ = bytes(_HEADER_BYTES)
_SMALLEST_BLOCK_BYTES = 1 << 12
# Address space that is reserved; a page takes memory only once it is written.
_SPACE_BYTES = 1 << 36


class _Key(NamedTuple):
    """Identifies a message to this rank: group, the sender's position there, and its number."""

    group: int
    sender: int
    turn: int


class _Message(NamedTuple):
    """Place of a message in the sender's memory, and the header byte that its reader clears."""

    offset: int
    num_bytes: int
    reader: int


# A key and a message: few enough bytes that a pipe takes them in one piece.
_RECORD = struct.Struct("6q")
# Thousands of records, far more than a rank sends before it waits for one.
_PIPE_BYTES = 1 << 18
# Processors other than x86 may move a block's release before its reads; not across a lock.
_FENCE = Lock()


class _Blocks:
    """Memory that other processes map, in blocks that are reused once they have been read."""

    def __init__(self) -> None:
        # Nameless: nothing is left behind, however the process ends.
        self.file = os.memfd_create("monta-messages")
        os.ftruncate(self.file, _SPACE_BYTES)
        self._memory = mmap.mmap(self.file, _SPACE_BYTES)
        self._address = _address_of(self._memory)
        self._offsets: dict[int, list[int]] = defaultdict(list)
        self._end = 0

    def put(self, tensor: torch.Tensor, num_readers: int) -> int:
        """Copy a contiguous tensor into a free block; returns the block's offset."""
        offset = self._free_block(_HEADER_BYTES + tensor.nbytes)
        ctypes.memmove(self._address + offset + _HEADER_BYTES, tensor.data_ptr(), tensor.nbytes)
        self._memory[offset : offset + num_readers] = b"\1" * num_readers
        return offset

    def _free_block(self, num_bytes: int) -> int:
        size = 1 << (max(num_bytes, _SMALLEST_BLOCK_BYTES) - 1).bit_length()
        # The first free one, which is the most likely to be in a cache.
        for offset in self._offsets[size]:
            if self._memory[offset : offset + _HEADER_BYTES] == _ALL_READ:
                return offset
        offset = self._end
        if offset + size > _SPACE_BYTES:
            raise RuntimeError(f"messages take {offset:,} bytes of memory, no room for {size:,}")
        self._end += size
        self._offsets[size].append(offset)
        return offset


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Process:
    """Another process of this node: its memory, its pipe, and a pidfd that shows when it ends."""

    memory: mmap.mmap
    address: int
    pipe: int
    end: int


class _Mailbox:
    """This process's blocks, its pipe, and the messages that have arrived but not been taken."""

    def __init__(self) -> None:
        # Random, because process ids are reused.
        self.name = secrets.randbits(62)
        self.blocks = _Blocks()
        self._pipe, self.pipe = os.pipe()
        fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._pipe, False)
        self._processes: dict[int, _Process] = {}
        self._ended: set[int] = set()
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)
        self._messages: dict[_Key, _Message] = {}
        # Several threads may wait (timelines do); one at a time reads the pipe for all of them.
        self._changed = Condition()
        self._has_reader = False

    def open(self, name: int, pid: int, memory: int, pipe: int) -> _Process:
        """Map the memory of a process and open its pipe.

        Args:
            name: name of the process's mailbox.
            pid, memory, pipe: process ID, and file descriptors of its memory and pipe.
        """
        if name not in self._processes:
            files = Path(f"/proc/{pid}/fd")
            with (files / str(memory)).open("r+b", buffering=0) as file:
                mapped = mmap.mmap(file.fileno(), _SPACE_BYTES)
            into = os.open(files / str(pipe), os.O_WRONLY)
            process = _Process(
                memory=mapped, address=_address_of(mapped), pipe=into, end=os.pidfd_open(pid)
            )
            self._poll.register(process.end, select.POLLIN)
            self._processes[name] = process
        return self._processes[name]

    def has(self, key: _Key) -> bool:
        """Whether a message has arrived."""
        with self._changed:
            if not self._has_reader:
                self._read_pipe()
            return key in self._messages

    def take(self, process: _Process, key: _Key, until: float) -> _Message:
        """Wait for a message and take it.

        Raises:
            RuntimeError: its sender has ended, or has not sent it by the time `until`.
        """
        with self._changed:
            while key not in self._messages:
                remaining = until - time.monotonic()
                if process.end in self._ended:
                    raise RuntimeError(f"rank {key.sender} of the group has ended")
                if remaining <= 0:
                    raise RuntimeError(f"rank {key.sender} of the group has sent nothing in time")
                if self._has_reader:
                    self._changed.wait(remaining)
                else:
                    self._wait_for_messages(remaining)
            return self._messages.pop(key)

    def _wait_for_messages(self, seconds: float) -> None:
        self._has_reader = True
        self._changed.release()
        try:
            ready = [file for file, _ in self._poll.poll(seconds * 1e3)]
        finally:
            self._changed.acquire()
            self._has_reader = False
            self._changed.notify_all()
        # Only after the poll: what a process wrote before it ended is in the pipe by then.
        self._read_pipe()
        for file in ready:
            if file != self._pipe:
                self._poll.unregister(file)
                self._ended.add(file)

    def _read_pipe(self) -> None:
        try:
            records = os.read(self._pipe, _PIPE_BYTES)
        except BlockingIOError:
            return
        for values in _RECORD.iter_unpack(records):
            self._messages[_Key(*values[:3])] = _Message(*values[3:])


# The mailbox of this process; a fork makes another.
_mailbox = functools.cache(_Mailbox)
os.register_at_fork(after_in_child=_mailbox.cache_clear)


class Neighbours:
    """The ranks of a group that are on this rank's node, and messages to and from them.

    Attributes:
        positions: positions of the neighbours in the group, without this rank.
        are_whole_group: whether all ranks of the group are neighbours of each other.
    """

    # Called on all ranks of the group at once: they exchange where their memory is.
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = group.rank()
        timeout = timeout_of(group)
        assert timeout is not None, "Gloo tells the time limit of a group"
        self._timeout = timeout
        self._group, self._processes, self.are_whole_group = _meet(group)
        self.positions = frozenset(self._processes)
        # Messages to and from each position so far.
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def send(self, tensor: torch.Tensor, positions: Sequence[int]) -> None:
        """Send a tensor to some neighbours; it may be changed as soon as this returns.

        Raises:
            RuntimeError: a neighbour has ended, or messages fill the memory.
        """
        offset = _mailbox().blocks.put(tensor.contiguous(), len(positions))
        for reader, position in enumerate(positions):
            record = _RECORD.pack(
                *_Key(self._group, self._rank, self._sent[position]),
                *_Message(offset, tensor.nbytes, reader),
            )
            self._sent[position] += 1
            try:
                os.write(self._processes[position].pipe, record)
            except BrokenPipeError:
                raise RuntimeError(f"rank {position} of the group has ended") from None

    def receive(self, tensor: torch.Tensor, position: int) -> "Receipt":
        """Receive a contiguous tensor from a neighbour, in the order in which it sends them."""
        assert tensor.is_contiguous(), f"strides {tensor.stride()}"
        key = _Key(self._group, position, self._received[position])
        self._received[position] += 1
        return Receipt(tensor, self._processes[position], key, self._timeout)


@dataclass(frozen=True, eq=False)
class Receipt:
    """A message to be received, used like the handle of an asynchronous collective."""

    tensor: torch.Tensor
    process: _Process
    key: _Key
    timeout: timedelta

    def wait(self) -> bool:
        """Copy the message into the tensor once it has arrived; to be called only once.

        Raises:
            RuntimeError: the sender has ended, sends nothing, or sends a different number of bytes.
        """
        until = time.monotonic() + self.timeout.total_seconds()
        message = _mailbox().take(self.process, self.key, until)
        if message.num_bytes != self.tensor.nbytes:
            raise RuntimeError(
                f"rank {self.key.sender} of the group sent {message.num_bytes} bytes where "
                f"{self.tensor.nbytes} were expected"
            )
        data = self.process.address + message.offset + _HEADER_BYTES
        ctypes.memmove(self.tensor.data_ptr(), data, message.num_bytes)
        with _FENCE:
            self.process.memory[message.offset + message.reader] = 0
        return True

    def is_completed(self) -> bool:
        """Whether the message has arrived."""
        return _mailbox().has(self.key)


_neighbours: WeakKeyDictionary[dist.ProcessGroup, Neighbours] = WeakKeyDictionary()


def neighbours_of(group: dist.ProcessGroup) -> Neighbours:
    """The neighbours in a group; the first call for a group is a collective over it."""
    if group not in _neighbours:
        _neighbours[group] = Neighbours(group)
    return _neighbours[group]


def _meet(group: dist.ProcessGroup) -> tuple[int, dict[int, _Process], bool]:
    """A number for the group, position -> neighbour, and whether all are neighbours of all.

    The first and the last are the same on all ranks of the group.
    """
    size = group.size()
    if not 1 < size <= _HEADER_BYTES:
        return 0, {}, size == 1
    mailbox = _mailbox()
    files = (mailbox.blocks.file, mailbox.pipe)
    card = [secrets.randbits(62), *_node(), mailbox.name, os.getpid(), *files]
    cards = _gather_values(card, group)
    processes = {
        position: mailbox.open(*other)
        for position, (_, boot, net_ns, pid_ns, *other) in enumerate(cards)
        if position != group.rank() and (boot, net_ns, pid_ns) == _node()
    }
    # Nobody ends before all have opened its files.
    num_opened = _gather_values([len(processes)], group)
    return cards[0][0], processes, all(number == [size - 1] for number in num_opened)


@functools.cache
def _node() -> tuple[int, ...]:
    """An identity that is the same for ranks of one node, and for no others."""
    boot = BOOT_ID.read_text()
    namespaces = (Path("/proc/self/ns") / name for name in ("net", "pid"))
    return (int(boot[:8], 16), *(namespace.stat().st_ino for namespace in namespaces))


def _gather_values(values: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    tensor = torch.tensor(values)
    by_rank = [torch.empty_like(tensor) for _ in range(group.size())]
    _all_gather(by_rank, tensor, group=group)
    return [values.tolist() for values in by_rank]
