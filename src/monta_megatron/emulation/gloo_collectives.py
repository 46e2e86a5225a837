"""torch.distributed as Megatron calls it for NCCL, on Gloo process groups.

Gloo lacks an all-gather of unequal sizes and takes several times longer than needed for a
reduce-scatter of unequal sizes. Both are central to an expert-tensor-parallel exchange, so the
choice of stand-in decides what a comparison of dispatchers on CPU ranks is worth: each is the
fastest of those measured, and every caller, Megatron's own dispatcher or ours, gets the same one.
Inside a node rows go through memory (node_memory.py), between nodes through Gloo.

Notation:
    n: ranks of the group
    r: this rank's position in it
"""

import atexit
import functools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from monta_megatron.emulation.node_memory import Receipt, neighbours_of

# torch's own; untyped, because they return None only on a rank outside the group, and because
# Gloo's options are private.
_all_gather_into_tensor: Callable[..., Any] = dist.all_gather_into_tensor
_broadcast: Callable[..., Any] = dist.broadcast
_init_process_group: Callable[..., None] = dist.init_process_group
_reduce_scatter: Callable[..., Any] = dist.reduce_scatter
_gloo: Any = dist.ProcessGroupGloo

# Threads that run a group's collectives: the number that torch uses.
_THREADS_PER_DEVICE = 2

# Pipeline stages send with tag 0.
TAG = 7

# Parts up to this size are gathered from every rank directly, even between nodes. Gloo passes them
# around a ring of n - 1 steps, each of which wakes another process but crosses nodes less often.
_DIRECT_GATHER_BYTES = 1 << 14


def install() -> None:
    """Put the stand-ins in the place of torch.distributed's functions."""
    for stand_in in (
        all_gather,
        all_gather_into_tensor,
        all_to_all,
        all_to_all_single,
        init_process_group,
        reduce_scatter,
    ):
        setattr(dist, stand_in.__name__, stand_in)
    # Where torch.distributed looks for it when it makes a group.
    setattr(distributed_c10d, dist.ProcessGroupGloo.__name__, SharedDeviceGloo)
    # Megatron never destroys its process groups, and Gloo threads that still run when the process
    # ends can abort it ("terminate called without an active exception") as they free tensors.
    atexit.register(_destroy_process_groups)


def _destroy_process_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    _devices.cache_clear()
    time.sleep(0.1)


class SharedDeviceGloo(dist.ProcessGroupGloo):
    """A Gloo group that shares one device with the other groups of its process.

    Gloo gives every group a device, and every device a thread that wakes up a hundred times a
    second, whether there is work or not. Megatron makes two dozen groups: with 8 ranks on 2 cores
    they take an eighth of the machine.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **options: Any
    ) -> None:
        settings = _gloo._Options()
        settings._timeout = timeout
        settings._devices = _devices()
        settings._threads = _THREADS_PER_DEVICE * len(settings._devices)
        for name, value in options.items():
            setattr(settings, name, value)
        super().__init__(store, rank, size, settings)


@functools.cache
def _devices() -> list[Any]:
    """Made as torch does for each group: on the interfaces that the environment names, if any."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interfaces:
        return [_gloo.create_default_device()]
    return [_gloo.create_device(interface=name) for name in interfaces.split(",")]


class PendingWork:
    """The handle of an asynchronous collective that consists of several operations here.

    Args:
        works: operations, all of them started.
        finish: function for the rest of the work on this rank; the first `wait` runs it once the
            operations are done.
    """

    def __init__(
        self,
        works: Sequence["dist.Work | Receipt | PendingWork"],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._works = works
        self._finish = finish
        self._error: BaseException | None = None

    def wait(self) -> bool:
        """Return once the result is in the output tensors; after a failure raise it every time."""
        if self._error is not None:
            raise self._error
        works, finish = self._works, self._finish
        # Receipts are waited for once, and works hold their tensors.
        self._works, self._finish = (), lambda: None
        try:
            for work in works:
                work.wait()
            finish()
        except BaseException as error:
            self._error = error
            raise
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return without waiting for a peer."""
        return all(work.is_completed() for work in self._works)

    def get_future_result(self) -> None:
        """Raise, as Gloo's own handles do: only `wait` tells that it has ended."""
        raise RuntimeError("Gloo has no future of a result")


def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """`torch.distributed.init_process_group`; Gloo where NCCL is asked for by name or default.

    Megatron: `--distributed-backend` defaults to nccl (training/initialize.py).
    """
    if backend is None or "nccl" in backend:
        backend = "gloo"
    _init_process_group(backend, *args, **kwargs)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | torch.Tensor | None = None,
    input_split_sizes: Sequence[int] | torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> PendingWork | None:
    """`torch.distributed.all_to_all_single`, with splits that may be tensors.

    Megatron: its dispatcher turns splits into numpy arrays only if they are CUDA tensors
    (`maybe_move_tensor_to_cpu`), which no tensor is on CPU ranks.
    """
    group = _given(group)
    outputs = output.split_with_sizes(_sizes(output_split_sizes, output, group.size()))
    inputs = input.contiguous().split_with_sizes(_sizes(input_split_sizes, input, group.size()))
    return all_to_all(outputs, inputs, group, async_op)


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> PendingWork | None:
    """`torch.distributed.all_to_all`, which Gloo lacks, of contiguous tensors."""
    group = _given(group)
    messages = [(input_tensor_list[peer], [peer]) for peer in _peers(group)]
    pending = _exchange(output_tensor_list, messages, group)
    output_tensor_list[group.rank()].copy_(input_tensor_list[group.rank()])
    return _returned(pending, async_op)


def _given(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A collective's group: all ranks unless it is given."""
    group = group or dist.group.WORLD
    assert group is not None, "a collective before init_process_group"
    return group


def _sizes(
    sizes: Sequence[int] | torch.Tensor | None, whole: torch.Tensor, num_ranks: int
) -> list[int]:
    if sizes is None:
        return [whole.shape[0] // num_ranks] * num_ranks
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else list(map(int, sizes))


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The other positions in a group: r + 1, r + 2, ..."""
    rank, size = group.rank(), group.size()
    return [(rank + step) % size for step in range(1, size)]


def _exchange(
    outputs: Sequence[torch.Tensor],
    messages: Sequence[tuple[torch.Tensor, Sequence[int]]],
    group: dist.ProcessGroup,
) -> PendingWork:
    """Send tensors to peers, and receive one from each; all ranks know which of them are empty.

    Args:
        outputs: output tensors, one per position, for what that rank sends here.
        messages: tensors to send, each with the positions of its receivers.
    """
    # Receives first, then sends. 2 x 2 ranks, nodes joined at 500 Mbit/s, 4 and 16 MB: 94 and 89%
    # of the link; Gloo's own posts each send first, so that a peer's "ready to receive" waits
    # with megabytes of data in front, and the link idles in one direction: 62 and 81%.
    node = neighbours_of(group)
    senders = [peer for peer in reversed(_peers(group)) if outputs[peer].numel() > 0]
    messages = [(tensor, peers) for tensor, peers in messages if tensor.numel() > 0]
    works: list[dist.Work | Receipt] = [
        group.recv([outputs[peer]], peer, TAG) for peer in senders if peer not in node.positions
    ]
    works += [
        group.send([tensor], peer, TAG)
        for tensor, peers in messages
        for peer in peers
        if peer not in node.positions
    ]
    for tensor, peers in messages:
        if here := [peer for peer in peers if peer in node.positions]:
            node.send(tensor, here)
    # Waited for first: the host copies these while the network is busy with the others.
    receipts = [node.receive(outputs[peer], peer) for peer in senders if peer in node.positions]
    return PendingWork([*receipts, *works])


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> PendingWork | None:
    """`torch.distributed.all_gather`, with tensors that may be of unequal sizes.

    Megatron: the dispatcher's gather over expert-tensor-parallel ranks, whose token counts differ
    (`_gather_along_first_dim` with `output_split_sizes`).
    """
    group = _given(group)
    tensor_list[group.rank()].copy_(tensor)
    if _gathers_directly(tensor_list, group):
        messages = [(tensor.contiguous(), _peers(group))]
        return _returned(_exchange(tensor_list, messages, group), async_op)
    # One broadcast per rank. 4 ranks on 2 cores, about 2 MB each, medians: broadcasts 8.7 ms, one
    # all_to_all_single of n copies 8.6 to 12.8 ms (and n times the memory), all_gather padded to
    # the longest 15 to 18 ms, 31 to 34 ms where one rank has most of the rows. For equal sizes and
    # for small messages too it is not slower than Gloo's own (8.5 and 13 ms, 3.4 and 5.1 ms).
    works = [
        _broadcast(part, group_src=source, group=group, async_op=True)
        for source, part in enumerate(tensor_list)
    ]
    return _returned(PendingWork(works), async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | PendingWork | None:
    """`torch.distributed.all_gather_into_tensor`; Gloo's own if large parts cross nodes.

    Megatron: DDP gathers parameters inside torch's `_coalescing_manager` and waits for the manager
    alone, which knows of no collective but those that torch's own functions leave to it.
    """
    group = _given(group)
    is_coalesced = group in distributed_c10d._world.pg_coalesce_state
    if is_coalesced or not _gathers_directly([input_tensor], group):
        return _all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
    parts = output_tensor.view(group.size(), *input_tensor.shape).unbind()
    return all_gather(list(parts), input_tensor, group=group, async_op=async_op)


def _gathers_directly(parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> bool:
    """Whether to gather directly; the same on every rank, as all know the parts' sizes."""
    largest_bytes = max(part.nbytes for part in parts)
    return neighbours_of(group).are_whole_group or largest_bytes <= _DIRECT_GATHER_BYTES


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | PendingWork | None:
    """`torch.distributed.reduce_scatter`, with tensors that may be of unequal sizes.

    Sums are taken in ascending rank order and in the tensors' own dtype.

    Megatron: the reverse of the gather above (`_reduce_scatter_along_first_dim` with
    `input_split_sizes`).
    """
    # All parts exchanged, then added on their owner. 4 ranks on 2 cores, about 2 MB each, medians:
    # this 8.4 ms, isend and irecv 9.3 to 12.8 ms, all_reduce of everything 16 to 19 ms, n reduces
    # 18 to 20 ms, Gloo's own 26 to 31 ms, padded to the longest 23 to 31 ms and up to 124 ms.
    if op != dist.ReduceOp.SUM:
        return _reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    received = output.new_empty((len(input_list), *output.shape))
    inputs = [part.contiguous() for part in input_list]
    work = all_to_all(received.unbind(), inputs, group, async_op=True)
    assert work is not None

    def add() -> None:
        total = received[0]
        for part in received[1:]:
            total += part
        output.copy_(total)

    return _returned(PendingWork([work], add), async_op)


def _returned(pending: PendingWork, async_op: bool) -> PendingWork | None:
    if async_op:
        return pending
    pending.wait()
    return None
