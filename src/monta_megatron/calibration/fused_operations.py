"""Operations in memory that a calibration times where Triton kernels run an exchange on a GPU.

Notation: N = rows, W = experts of a row, M = copies, H = hidden size.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from monta_megatron.calibration.memory_operations import (
    Prepare,
    drawn_lists,
    lists,
    rows_of,
    rows_with_lists,
)
from monta_megatron.calibration.tasks import NUM_COPIES, Point
from monta_megatron.chains.stages import Parts
from monta_megatron.exchange.copies import Copies
from monta_megatron.exchange.kernels.duplicate import duplicate
from monta_megatron.exchange.kernels.expert_lists import expert_ids_of
from monta_megatron.exchange.kernels.find_copies import find_copies
from monta_megatron.exchange.kernels.reduce import reduce
from monta_megatron.exchange.memory import Columns, MessageFormat


def _copy(point: Point, device: torch.device) -> Callable[[], object]:
    columns, copies = _columns(point.num_rows, device)
    payload = MessageFormat.of(columns.tensors(), packed=True)

    def copy() -> list[torch.Tensor]:
        messages = payload.allocate(point.num_rows)
        duplicate(columns, copies, payload.columns(messages))
        return messages

    return copy


def _put(point: Point, device: torch.device) -> Callable[[], object]:
    columns, copies = _columns(point.num_rows, device)
    in_order = copies._replace(row=torch.arange(point.num_rows, device=device))

    def put() -> Columns:
        into = Columns(torch.empty_like(columns.rows), columns.rows.new_empty(point.num_rows))
        duplicate(columns, in_order, into, copies.row)
        return into

    return put


def _columns(num_rows: int, device: torch.device) -> tuple[Columns, Copies]:
    """Rows with their lists, and one copy of each row, in random order, for its first expert."""
    columns, order_N = rows_with_lists(num_rows, device)
    starts = torch.arange(num_rows + 1, device=device)
    return Columns(*columns), Copies(order_N, order_N.argsort(), starts, torch.zeros_like(order_N))


def _sum(point: Point, device: torch.device) -> Callable[[], object]:
    num_rows, num_copies = point.num_rows, point.num_rows * NUM_COPIES
    # One expert of every part, so that each row has a copy in every part.
    ids_NW = torch.arange(NUM_COPIES, dtype=torch.int32, device=device).repeat(num_rows, 1)
    parts = Parts(first=0, size=1, num_parts=NUM_COPIES)
    copies, rows_MH = Copies.empty(num_rows, num_copies, parts, device), rows_of(num_copies, device)
    find_copies(ids_NW, parts, copies)
    columns = Columns(rows_MH, torch.ones(num_copies, device=device))
    # Allocated in advance, as by the executor.
    into = Columns(torch.empty_like(rows_MH[:num_rows]), torch.empty(ids_NW.shape, device=device))
    return lambda: reduce(columns, copies, into, torch.float32)


def _find(point: Point, device: torch.device) -> Callable[[], object]:
    ids_NW, parts, num_copies = drawn_lists(point.num_rows, device)
    copies = Copies.empty(point.num_rows, num_copies, parts, device)
    return lambda: find_copies(ids_NW, parts, copies)


_lists = partial(lists, list_experts=expert_ids_of)
OPERATIONS = (("copy", _copy), ("put", _put), ("sum", _sum), ("lists", _lists))
IN_MEMORY: Mapping[str, Prepare] = dict((*OPERATIONS, ("find", _find), ("find_lists", _find)))
