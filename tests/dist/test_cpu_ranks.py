"""The stand-ins of the CPU ranks, one by one; trainings on them are in tests/megatron."""

import os
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from equal import assert_equal
from pool import on_ranks
from run_python import run_python

from monta_megatron.emulation import gloo_collectives, node_memory

pytest.importorskip("megatron.core", reason="pip install megatron-core")

COLUMNS = 5
# Rows of each rank, or for each rank.
ROWS = (3, 0, 2, 4)


def rows_of(source: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(source)
    return (4 * torch.randn(num_rows, COLUMNS, generator=generator)).to(dtype)


@cache
def groups() -> list[dist.ProcessGroup]:
    """The groups of this rank: all ranks, and one in which positions are not ranks."""
    some = dist.new_group([1, 2, 3])
    assert dist.group.WORLD is not None
    return [dist.group.WORLD, some][: 1 + (dist.get_rank() > 0)]


def finish(work: dist.Work | None) -> None:
    """Wait for a collective, twice; there is none of one that blocks."""
    if work is not None:
        work.wait()
        work.wait()
        assert work.is_completed()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@on_ranks(4)
def test_gathers(dtype: torch.dtype, is_async: bool) -> None:
    for group in groups():
        rank, size = group.rank(), group.size()
        for num_rows in (ROWS[:size], (2,) * size, (0,) * size):
            parts = [rows_of(source, rows, dtype) for source, rows in enumerate(num_rows)]
            expected = torch.cat(parts)
            output = torch.empty_like(expected)
            outputs = list(output.split(num_rows))
            finish(dist.all_gather(outputs, parts[rank], group=group, async_op=is_async))
            assert_equal(output, expected, num_rows)
            shapes = [expected.shape, (size, *parts[rank].shape)]
            for shape in shapes if len(set(num_rows)) == 1 else ():
                output = torch.empty(shape, dtype=dtype)
                finish(dist.all_gather_into_tensor(output, parts[rank], group, is_async))
                assert_equal(output, expected.view(shape), num_rows)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(4)
def test_sums_and_exchanges(dtype: torch.dtype, is_async: bool) -> None:
    for group in groups():
        rank, size = group.rank(), group.size()
        sizes = ROWS[:size]
        whole = [rows_of(source, sum(sizes), dtype) for source in range(size)]
        parts = [rows.split(sizes) for rows in whole]
        total = parts[0][rank].clone()
        for part in parts[1:]:
            total += part[rank]
        # Parts of one tensor, and tensors apart.
        for inputs in (list(parts[rank]), [part.clone() for part in parts[rank]]):
            output = torch.full_like(total, torch.nan)
            finish(dist.reduce_scatter(output, inputs, group=group, async_op=is_async))
            assert_equal(output, total, "sum")
        output = torch.full((size * sizes[rank], COLUMNS), torch.nan, dtype=dtype)
        splits = torch.full((size,), sizes[rank]), torch.tensor(sizes)
        finish(dist.all_to_all_single(output, whole[rank], *splits, group, is_async))
        assert_equal(output, torch.cat([part[rank] for part in parts]), "exchange")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "collective", ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"]
)
@on_ranks(4)
def test_collectives_of_a_coalescing_manager(collective: str, is_async: bool) -> None:
    """As Megatron's DDP starts them: in place, several buckets, and only the manager is awaited."""
    for group in groups():
        rank, size = group.rank(), group.size()
        buckets = [torch.full((2 * size,), float(rank + number)) for number in range(3)]
        shards = [bucket.chunk(size)[rank] for bucket in buckets]
        with dist._coalescing_manager(group, async_ops=is_async) as manager:
            for bucket, shard in zip(buckets, shards, strict=True):
                if collective == "all_gather_into_tensor":
                    dist.all_gather_into_tensor(bucket, shard, group=group, async_op=is_async)
                elif collective == "reduce_scatter_tensor":
                    dist.reduce_scatter_tensor(shard, bucket, group=group, async_op=is_async)
                else:
                    dist.all_reduce(bucket, group=group, async_op=is_async)
        if is_async:
            manager.wait()
        for number, (bucket, shard) in enumerate(zip(buckets, shards, strict=True)):
            if collective == "all_gather_into_tensor":
                result = bucket
                expected = torch.arange(size).repeat_interleave(2) + number
            else:
                result = shard if collective == "reduce_scatter_tensor" else bucket
                expected = torch.full_like(result, sum(range(size)) + size * number)
            assert_equal(result, expected.to(result), number)


@on_ranks(4)
def test_messages_of_a_node() -> None:
    rank = dist.get_rank()
    node = node_memory.neighbours_of(groups()[0])
    assert node.positions == {0, 1, 2, 3} - {rank}
    before, behind = (rank - 1) % 4, (rank + 1) % 4
    # Everyone sends, and nobody waits yet. Then the last one first.
    message, num_messages = torch.empty(3, dtype=torch.int64), 2000
    for number in range(num_messages):
        node.send(message.fill_(num_messages * rank + number), [behind])
    message.fill_(-1)
    received = torch.empty(num_messages, 3, dtype=torch.int64)
    receipts = [node.receive(row, before) for row in received]
    for receipt in reversed(receipts):
        receipt.wait()
    assert received[:, 2].tolist() == [num_messages * before + n for n in range(num_messages)]
    node.send(message, [behind])
    work = gloo_collectives.PendingWork([node.receive(torch.empty(2), before)])
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            work.wait()
        expected = f"rank {before} of the group sent 24 bytes where 8 were expected"
        assert str(error.value) == expected


def test_memory_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "_SPACE_BYTES", 2 * node_memory._SMALLEST_BLOCK_BYTES)
    blocks = node_memory._Blocks()
    assert [blocks.put(torch.ones(9), 1) for _ in range(2)] == [0, 4096]
    with pytest.raises(RuntimeError, match="take 8,192 bytes of memory, no room for 4,096"):
        blocks.put(torch.ones(9), 1)


@on_ranks(4)
def test_memory_of_messages_that_are_read_is_used_again() -> None:
    rows, used = torch.ones(4, 1 << 20), []
    for _ in range(20):
        dist.all_to_all_single(torch.empty_like(rows), rows)
        dist.barrier()
        used.append(os.fstat(node_memory._mailbox().blocks.file).st_blocks)
    # What tests before have sent is read with the first.
    assert len(set(used[2:])) == 1


@on_ranks(4)
def test_device() -> None:
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
    # A transfer to the host copies.
    copies = [made[0].cpu(), made[0].to("cpu"), made[0].to(torch.device("cpu"))]
    copies.append(made[0].to(device="cpu", non_blocking=True))
    made[0].zero_()
    assert all(copied.tolist() == [1, 1] for copied in copies)


@on_ranks(4)
def test_generator() -> None:
    """A stream of numbers per name, whatever was drawn in between."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    def draw(names: str) -> dict[str, list[float]]:
        torch.cuda.manual_seed(11)
        tracker = CudaRNGStatesTracker()
        tracker.add("a", 1)
        tracker.add("b", 2)
        drawn: dict[str, list[float]] = {"a": [], "b": [], "-": []}
        for name in names:
            with tracker.fork(name) if name in "ab" else torch.no_grad():
                drawn[name].append(torch.rand(1, device="cuda").item())
        return drawn

    with torch.random.fork_rng(devices=()):
        drawn = draw("ab-ba-")
        assert drawn == draw("--aabb")
    assert len({number for numbers in drawn.values() for number in numbers}) == 6


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_ranks(4)
def test_norm_marks_its_weights(sequence_parallel: bool) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

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


def test_off_unless_asked_for() -> None:
    result = run_python(
        "-c", "import torch; print(torch.cuda.is_available())", CUDA_VISIBLE_DEVICES=""
    )
    assert result.stdout == "False\n", result.stderr


def test_transformer_engine_is_hidden_from_megatron(tmp_path: Path) -> None:
    """A package of its name, and its part, which would fail when imported."""
    for folder in (tmp_path / "transformer_engine", tmp_path / "transformer_engine" / "pytorch"):
        folder.mkdir()
        (folder / "__init__.py").write_text("raise RuntimeError('needs a GPU')")
    program = """
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.moe import moe_utils, router
try:
    import transformer_engine.pytorch
except ImportError as error:
    print(HAVE_TE, moe_utils.te_general_gemm, error.name)
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    result = run_python("-c", program, RANK="0", PYTHONPATH=path, MONTA_CPU_RANKS="1")
    assert result.stdout == "False None transformer_engine.pytorch\n", result.stderr
    assert result.stderr.count("monta-megatron: CPU ranks stand in for CUDA") == 1
    said = [line for line in result.stderr.splitlines() if "Transformer Engine" in line]
    assert len(said) == 1 and said[0].startswith("monta-megatron: Transformer Engine, which")


def test_stays_off_beside_a_gpu() -> None:
    program = """
import torch
torch.cuda.is_available = lambda: True
stream, all_gather = torch.cuda.Stream, torch.distributed.all_gather
from monta_megatron.emulation import cpu_ranks
cpu_ranks.install()
assert torch.cuda.Stream is stream
assert torch.distributed.all_gather is all_gather
"""
    result = run_python("-c", program, RANK="0", MONTA_CPU_RANKS="0")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("CPU ranks stay off, a GPU is available") == 1
