"""Operations in memory that a calibration times, on buffers allocated as the executor does.

Notation: N = rows, W = experts of a row, E = experts, H = hidden size, M = copies, P = parts.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from monta_megatron.calibration import tasks
from monta_megatron.calibration.tasks import NUM_COPIES, NUM_EXPERTS, TOPK, Point
from monta_megatron.chains.stages import Parts
from monta_megatron.exchange.copies import Copies, PartBounds, find_copies, put_rows
from monta_megatron.exchange.count_messages import CountMessages
from monta_megatron.exchange.expert_lists import expert_ids_of
from monta_megatron.exchange.memory import MessageFormat

# Allocates the buffers of an operation in memory; returns a function that runs it.
Prepare: TypeAlias = Callable[[Point, torch.device], Callable[[], object]]


def _copy(point: Point, device: torch.device) -> Callable[[], object]:
    columns, index_N = rows_with_lists(point.num_rows, device)
    payload = MessageFormat.of(columns, packed=True)

    def copy() -> list[torch.Tensor]:
        messages = payload.allocate(point.num_rows)
        for into, column in zip(payload.columns(messages).tensors(), columns, strict=True):
            torch.index_select(column, 0, index_N, out=into)
        return messages

    return copy


def _put(point: Point, device: torch.device) -> Callable[[], object]:
    (hidden_NH, probs_NW, _), index_N = rows_with_lists(point.num_rows, device)

    def put() -> list[torch.Tensor]:
        outputs = [torch.empty_like(column) for column in (hidden_NH, probs_NW)]
        for output, column in zip(outputs, (hidden_NH, probs_NW), strict=True):
            put_rows(output, index_N, column)
        return outputs

    return put


def rows_with_lists(num_rows: int, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """[N, H] rows with their [N, W] probabilities and expert ids, and a random order [N]."""
    probs_NW = torch.ones(num_rows, TOPK, device=device)
    # Small, but each column is an operation.
    columns = [rows_of(num_rows, device), probs_NW, probs_NW.to(torch.int32)]
    order_N = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    return columns, order_N.to(device)


def _sum(point: Point, device: torch.device) -> Callable[[], object]:
    num_rows, num_copies = point.num_rows, point.num_rows * NUM_COPIES
    # One expert of every part, so that each row has a copy in every part.
    ids_NW = torch.arange(NUM_COPIES, device=device).expand(num_rows, -1)
    parts = Parts(first=0, size=1, num_parts=NUM_COPIES)
    copies, rows_MH = Copies.empty(num_rows, num_copies, parts, device), rows_of(num_copies, device)
    find_copies(ids_NW, PartBounds.of(parts, num_rows, num_copies, ids_NW), copies)
    shares_M = torch.ones(num_copies, device=device)

    def add() -> torch.Tensor:
        # Sum in fp32, into a message allocated separately; then scatter the probabilities to the
        # places of their experts.
        into_NH = rows_MH.new_empty(num_rows, rows_MH.shape[1])
        into_NH.copy_(copies.sum_by_row(rows_MH, torch.float32))
        into_probs_NW = shares_M.new_zeros(num_rows, NUM_COPIES)
        into_probs_NW[copies.row, copies.place] = shares_M
        return into_NH

    return add


def _find(point: Point, device: torch.device) -> Callable[[], object]:
    ids_NW, parts, num_copies = drawn_lists(point.num_rows, device)
    copies = Copies.empty(point.num_rows, num_copies, parts, device)
    return lambda: find_copies(
        ids_NW, PartBounds.of(parts, point.num_rows, num_copies, ids_NW), copies
    )


def count(
    point: Point, device: torch.device, count_messages: CountMessages
) -> Callable[[], object]:
    num_experts = count_messages.layout.num_experts
    map_NE = routing_map(point.num_rows * NUM_EXPERTS // num_experts, num_experts).to(device)
    return lambda: count_messages.count(map_NE)


def lists(
    point: Point, device: torch.device, list_experts: Callable[..., object] = expert_ids_of
) -> Callable[[], object]:
    """Derive the expert lists of tokens, as the dispatcher does."""
    routing_map_NE = routing_map(point.num_rows, NUM_EXPERTS).to(device)
    probs_NE = torch.ones(point.num_rows, NUM_EXPERTS, device=device)
    return lambda: list_experts(routing_map_NE, probs_NE, TOPK)


OPERATIONS = (("copy", _copy), ("put", _put), ("sum", _sum), ("lists", lists))
IN_MEMORY: Mapping[str, Prepare] = dict((*OPERATIONS, ("find", _find), ("find_lists", _find)))


def rows_of(num_rows: int, device: torch.device) -> torch.Tensor:
    """[N, H]: CPUs sum fp32 rows; on GPUs rows are mostly bf16."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shape = num_rows, tasks.HIDDEN_ROW_BYTES // dtype.itemsize
    return torch.ones(shape, dtype=dtype, device=device)


def drawn_lists(num_rows: int, device: torch.device) -> tuple[torch.Tensor, Parts, int]:
    """[N, W] int32 random experts of each row, `TOPK` parts of all experts, number of copies."""
    ids_NW, size = draw_experts(num_rows, NUM_EXPERTS), NUM_EXPERTS // TOPK
    hits_NP = torch.zeros(num_rows, TOPK, dtype=torch.bool).scatter(1, ids_NW // size, True)
    parts = Parts(first=0, size=size, num_parts=TOPK)
    return ids_NW.int().to(device), parts, int(hits_NP.sum())


def draw_experts(num_rows: int, num_experts: int) -> torch.Tensor:
    """[N, W] random experts of each row, ascending."""
    scores_NE = torch.rand(num_rows, num_experts, generator=torch.Generator().manual_seed(1))
    return scores_NE.topk(TOPK, dim=1).indices.sort(dim=1).values


def routing_map(num_rows: int, num_experts: int) -> torch.Tensor:
    """[N, E] bool: random experts, as a map of Megatron's router."""
    ids_NW = draw_experts(num_rows, num_experts)
    return torch.zeros(num_rows, num_experts, dtype=torch.bool).scatter(1, ids_NW, True)
