"""What each rank of test_cpu_ranks.py checks; run by torchrun with MONTA_CPU_RANKS=1."""

import mmap
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from equal import assert_equal

from monta_megatron.emulation import node_memory
from monta_megatron.emulation.node_memory import neighbours_of

COLUMNS = 5


def part(source: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that any rank can make: those of rank `source`."""
    generator = torch.Generator().manual_seed(source)
    return (4 * torch.randn(num_rows, COLUMNS, generator=generator)).to(dtype)


def sizes() -> list[int]:
    """Rows per rank: none on rank 1."""
    return [3, 0, 2, 4][: dist.get_world_size()]


def check_all_gather() -> None:
    """Into a list and into a tensor, of one size or several."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for num_rows in (sizes(), [2] * num_ranks, [0] * num_ranks):
            parts = [part(source, rows, dtype) for source, rows in enumerate(num_rows)]
            expected = torch.cat(parts)
            for is_async in (False, True):
                what = (dtype, num_rows, is_async)
                output = torch.empty_like(expected)
                outputs = list(output.split(num_rows))
                finish(dist.all_gather(outputs, parts[rank], async_op=is_async))
                assert_equal(output, expected, what)
                if len(set(num_rows)) > 1:
                    continue
                for shape in (expected.shape, (num_ranks, *parts[rank].shape)):
                    output = torch.empty(shape, dtype=dtype)
                    finish(dist.all_gather_into_tensor(output, parts[rank], async_op=is_async))
                    assert_equal(output, expected.view(shape), what)


def finish(work: dist.Work | None) -> None:
    """Wait for a collective, twice; there is none of one that blocks."""
    if work is not None:
        work.wait()
        work.wait()
        assert work.is_completed()


def check_reduce_scatter() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        # Each rank's contribution to all parts; the last one is this rank's own sum.
        whole = [part(source, sum(sizes()), dtype) for source in range(num_ranks)]
        expected = whole[0].clone()
        for other in whole[1:]:
            expected += other
        expected = expected.split(sizes())[rank]
        neighbours = list(whole[rank].split(sizes()))
        for inputs in (neighbours, [piece.clone() for piece in neighbours]):
            for is_async in (False, True):
                output = torch.full_like(expected, torch.nan)
                finish(dist.reduce_scatter(output, inputs, async_op=is_async))
                assert_equal(output, expected, (dtype, is_async))
    largest = torch.empty(2)
    contributions = [torch.full((2,), float(rank)) for _ in range(num_ranks)]
    dist.reduce_scatter(largest, contributions, op=dist.ReduceOp.MAX)
    assert largest.tolist() == [num_ranks - 1] * 2


def check_groups_share_a_device() -> None:
    """Each device has a thread that hardly sleeps."""
    groups = [dist.group.WORLD, dist.new_group(list(range(dist.get_world_size())))]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    assert backends[0] is not backends[1]
    one, other = (device for backend in backends for device in backend.options._devices)
    assert one is other
    assert backends[1].options._timeout == backends[0].options._timeout


def check_collectives_of_a_group() -> None:
    """Positions in a group are not ranks."""
    last = dist.get_world_size() - 1
    group = dist.new_group([0, last])
    if dist.get_rank() not in (0, last):
        return
    parts = [part(0, 1, torch.float32), part(last, 2, torch.float32)]
    output = torch.empty(3, COLUMNS)
    dist.all_gather(list(output.split([1, 2])), parts[group.rank()], group=group)
    assert_equal(output, torch.cat(parts), "a group of the first and the last rank")


def check_all_to_all_single() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    send = torch.arange(num_ranks)
    output = torch.empty(rank * num_ranks)
    dist.all_to_all_single(
        output, torch.full((int(send.sum()),), float(rank)), torch.full((num_ranks,), rank), send
    )
    assert output.tolist() == [source for source in range(num_ranks) for _ in range(rank)]


def check_messages_of_a_node() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    node = neighbours_of(dist.group.WORLD)
    assert node.positions == set(range(num_ranks)) - {rank}
    before, behind = (rank - 1) % num_ranks, (rank + 1) % num_ranks
    # Everyone sends, and nobody waits yet. Then the last one first.
    message, num_messages = torch.empty(3, dtype=torch.int64), 2000
    for turn in range(num_messages):
        node.send(message.fill_(1000 * rank + turn), [behind])
    message.fill_(-1)
    received = torch.empty(num_messages, 3, dtype=torch.int64)
    receipts = [node.receive(row, before) for row in received]
    for receipt in reversed(receipts):
        receipt.wait()
    assert received[:, 2].tolist() == [1000 * before + turn for turn in range(num_messages)]
    # Another number of bytes than is expected.
    node.send(message, [behind])
    try:
        node.receive(torch.empty(2), before).wait()
    except RuntimeError as error:
        expected = f"rank {before} of the group sent 24 bytes where 8 were expected"
        assert str(error) == expected, error
    else:
        raise AssertionError("24 bytes where 8 were expected")


def check_memory_of_read_messages_is_used_again() -> None:
    num_ranks = dist.get_world_size()
    rows = torch.ones(num_ranks, 1 << 20)
    before = shared_bytes()
    for _ in range(20):
        dist.all_to_all_single(torch.empty_like(rows), rows)
        dist.barrier()
    # A message for each neighbour, and what stands in front of it on a page of its own.
    at_most = (num_ranks - 1) * (rows[0].nbytes + mmap.PAGESIZE)
    assert 0 < shared_bytes() - before <= at_most, (before, shared_bytes(), at_most)


def shared_bytes() -> int:
    """Of memory that this process made for its messages."""
    return os.fstat(node_memory._mailbox().blocks.file).st_blocks * 512


def check_device() -> None:
    device = torch.cuda.current_device()
    module = torch.nn.Linear(2, 2).cuda()
    made = [
        torch.ones(2, device="cuda"),
        torch.ones(2, device=device),
        torch.zeros(2, device=torch.device("cuda", device)),
        torch.ones(2).cuda(),
        torch.ones(2).to("cuda:0", torch.bfloat16),
        torch.ones(2).to(device),
        torch.ones(2).new_empty(2, device="cuda"),
        module.weight,
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert module.weight.type() == "torch.cuda.FloatTensor"
    assert made[4].type() == "torch.cuda.BFloat16Tensor"
    assert module.weight.type(torch.int64).dtype == torch.int64


def check_copy_to_host() -> None:
    on_device = torch.ones(2, device="cuda")
    copies = [on_device.cpu(), on_device.to("cpu"), on_device.to(torch.device("cpu"))]
    copies.append(on_device.to(device="cpu", non_blocking=True))
    on_device.zero_()
    assert all(copied.tolist() == [1, 1] for copied in copies)


class _Recomputed(torch.autograd.Function):
    """As Megatron's CheckpointFunction: a backward in its backward, which makes a tensor there."""

    @staticmethod
    def forward(ctx, x, depth):
        ctx.save_for_backward(x)
        ctx.depth = depth
        return 3 * x

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth == 0:
            return grad * torch.full((1,), 3.0, device="cuda"), None
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = _Recomputed.apply(x, ctx.depth - 1)
        torch.autograd.backward(y, grad)
        return x.grad, None


def check_backward_in_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    _Recomputed.apply(x, 1).sum().backward()
    assert x.grad.tolist() == [3, 3]


def check_generator() -> None:
    """A stream of numbers per name, whatever was drawn in between."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    def draw(order: str) -> dict[str, list[float]]:
        torch.cuda.manual_seed(11)
        tracker = CudaRNGStatesTracker()
        tracker.add("a", 1)
        tracker.add("b", 2)
        drawn: dict[str, list[float]] = {"a": [], "b": [], "-": []}
        for name in order:
            if name == "-":
                drawn[name].append(torch.rand(1, device="cuda").item())
                continue
            with tracker.fork(name):
                drawn[name].append(torch.rand(1, device="cuda").item())
        return drawn

    drawn = draw("ab-ba-")
    assert drawn == draw("--aabb")
    assert len({number for numbers in drawn.values() for number in numbers}) == 6


def check_streams() -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        rows = torch.ones(2, device="cuda")
        event = side.record_event()
    torch.cuda.current_stream().wait_event(event)
    rows.record_stream(torch.cuda.current_stream())
    event.synchronize()
    assert not torch.cuda.is_current_stream_capturing()


def check_norm_marks_its_weights() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    for sequence_parallel in (True, False):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
        )
        norm = WrappedTorchNorm(config, 8)
        assert {weight.sequence_parallel for weight in norm.parameters()} == {sequence_parallel}
        assert config.sequence_parallel == sequence_parallel


CHECKS: list[Callable[[], None]] = [
    function for name, function in list(globals().items()) if name.startswith("check_")
]


def main() -> None:
    assert torch.cuda.is_available()
    # As Megatron asks for it by default.
    dist.init_process_group("nccl")
    for check in CHECKS:
        check()
        dist.barrier()
        if dist.get_rank() == 0:
            print("passed", check.__name__, flush=True)


if __name__ == "__main__":
    sys.exit(main())
