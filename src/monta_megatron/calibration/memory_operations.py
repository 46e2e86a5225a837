"""Operations in memory that a calibration times, on buffers allocated as the executor does.

Notation: N = rows, W = experts of a token, E = experts, H = hidden size.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from monta_megatron.calibration import tasks
from monta_megatron.calibration.tasks import NUM_COPIES, NUM_EXPERTS, TOPK, Point
from monta_megatron.chains.stages import ExpertRange
from monta_megatron.exchange.buffers import MessageFormat
from monta_megatron.exchange.copies import Copies, Parts, find_copies, put_rows
from monta_megatron.exchange.counts import CountTable, expert_ids_of

# Makes the buffers of an operation in memory; the function that it returns runs it.
Prepare: TypeAlias = Callable[[Point, torch.device], Callable[[], object]]


def _copy(point: Point, device: torch.device) -> Callable[[], object]:
    columns, index = rows_with_lists(point.num_rows, device)
    payload = MessageFormat.of(columns, packed=True)

    def copy() -> list[torch.Tensor]:
        messages = payload.allocate(point.num_rows)
        for into, column in zip(payload.columns(messages).tensors(), columns, strict=True):
            torch.index_select(column, 0, index, out=into)
        return messages

    return copy


def _put(point: Point, device: torch.device) -> Callable[[], object]:
    (hidden, probs, _), index = rows_with_lists(point.num_rows, device)

    def put() -> list[torch.Tensor]:
        outputs = [torch.empty_like(column) for column in (hidden, probs)]
        for output, column in zip(outputs, (hidden, probs), strict=True):
            put_rows(output, index, column)
        return outputs

    return put


def rows_with_lists(num_rows: int, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """[N, H] rows with their [N, W] probabilities and expert ids, in an order: [N]."""
    probs = torch.ones(num_rows, TOPK, device=device)
    # Small, but operations of their own.
    columns = [rows_of(num_rows, device), probs, probs.to(torch.int32)]
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    return columns, order.to(device)


def _sum(point: Point, device: torch.device) -> Callable[[], object]:
    num_rows, num_copies = point.num_rows, point.num_rows * NUM_COPIES
    # [N, W] one expert of every part, so that a row has a copy in every part.
    ids = torch.arange(NUM_COPIES, device=device).expand(num_rows, -1)
    parts = ExpertRange(first=0, size=1, num_parts=NUM_COPIES)
    copies, source = Copies.empty(num_rows, num_copies, parts, device), rows_of(num_copies, device)
    find_copies(ids, Parts.of(parts, num_rows, num_copies, ids), copies)
    shares = torch.ones(num_copies, device=device)

    def add() -> torch.Tensor:
        # The sum is in fp32; the message that it is sent in is allocated separately. After it the
        # probabilities go back to the ids of their experts.
        into = source.new_empty(num_rows, source.shape[1])
        into.copy_(copies.sum_by_row(source, torch.float32))
        into_probs = shares.new_zeros(num_rows, NUM_COPIES)
        into_probs[copies.row, copies.place] = shares
        return into

    return add


def _find(point: Point, device: torch.device) -> Callable[[], object]:
    ids, parts, num_copies = drawn_lists(point.num_rows, device)
    copies = Copies.empty(point.num_rows, num_copies, parts, device)
    return lambda: find_copies(ids, Parts.of(parts, point.num_rows, num_copies, ids), copies)


def count(point: Point, device: torch.device, table: CountTable) -> Callable[[], object]:
    num_experts = table.layout.num_experts
    counted = routing_map(point.num_rows * NUM_EXPERTS // num_experts, num_experts).to(device)
    return lambda: table.count(counted)


def lists(
    point: Point, device: torch.device, list_experts: Callable[..., object] = expert_ids_of
) -> Callable[[], object]:
    """Makes the lists of experts of every token, as the dispatcher does."""
    on_device = routing_map(point.num_rows, NUM_EXPERTS).to(device)
    probs = torch.ones(point.num_rows, NUM_EXPERTS, device=device)
    return lambda: list_experts(on_device, probs, TOPK)


OPERATIONS = (("copy", _copy), ("put", _put), ("sum", _sum), ("lists", lists))
IN_MEMORY: Mapping[str, Prepare] = dict((*OPERATIONS, ("find", _find), ("find_lists", _find)))


def rows_of(num_rows: int, device: torch.device) -> torch.Tensor:
    """[N, H]: CPUs sum fp32 rows; on GPUs rows are mostly bf16."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shape = num_rows, tasks.HIDDEN_ROW_BYTES // dtype.itemsize
    return torch.ones(shape, dtype=dtype, device=device)


def drawn_lists(num_rows: int, device: torch.device) -> tuple[torch.Tensor, ExpertRange, int]:
    """[N, W] int32 drawn experts of each row, `TOPK` parts of all experts, and copies for these."""
    ids, size = draw_experts(num_rows, NUM_EXPERTS), NUM_EXPERTS // TOPK
    hits = torch.zeros(num_rows, TOPK, dtype=torch.bool).scatter(1, ids // size, True)
    parts = ExpertRange(first=0, size=size, num_parts=TOPK)
    return ids.int().to(device), parts, int(hits.sum())


def draw_experts(num_rows: int, num_experts: int) -> torch.Tensor:
    """[N, W] ascending experts of each row."""
    scores = torch.rand(num_rows, num_experts, generator=torch.Generator().manual_seed(1))
    return scores.topk(TOPK, dim=1).indices.sort(dim=1).values


def routing_map(num_rows: int, num_experts: int) -> torch.Tensor:
    """[N, E] bool: drawn experts, as Megatron's router has them."""
    ids = draw_experts(num_rows, num_experts)
    return torch.zeros(num_rows, num_experts, dtype=torch.bool).scatter(1, ids, True)
