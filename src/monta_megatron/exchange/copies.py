"""Copies made by `Duplicate`, rows gathered and scattered, and counts of a routing map.

Copies are derived on the device from the expert ids. The host knows the size of every output from
the counts, so nothing here waits for the device, and no kept tensor is allocated here.

A copy carries its token's whole list of experts. Each expert belongs to one part, so later stages
find theirs in the list, and on the way back every other copy adds 0 to a probability.
"""

from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from monta_megatron.chains.stages import Parts
from monta_megatron.exchange.sums import sum_rows

T = TypeVar("T", int, NDArray[np.int64])


def block_size(num_tokens: T, num_blocks: int) -> T:
    """Tokens of a full block: full blocks come first, then the remainder, then empty ones."""
    return -(-num_tokens // num_blocks)


def count_routing(
    routing_map_TE: torch.Tensor, num_blocks: int, num_parts: dict[str, int], with_most: bool
) -> dict[str, torch.Tensor]:
    """Count by token block: contiguous int32 tensors on the device of the map, with no sync.

    Args:
        routing_map_TE: bool.
        num_blocks: B.
        num_parts: P by name, for equal parts; each part consists of parts of the next kind.
        with_most: also return the most experts of any token.

    Returns:
        "experts": [B, E] tokens of each expert; for every name of parts, [B, P] tokens with an
        expert in each; "most experts": [1] of any token, 0 without tokens.
    """
    num_tokens = len(routing_map_TE)
    # The maximum of no tokens is undefined: pad blocks to one token without an expert.
    size = max(block_size(num_tokens, num_blocks), 1)
    if missing := num_blocks * size - num_tokens:
        routing_map_TE = torch.nn.functional.pad(routing_map_TE, (0, 0, 0, missing))
    # [T, E] -> [B, T/B, E]
    hits_BTE = routing_map_TE.view(num_blocks, size, -1)
    counts = {"experts": hits_BTE.sum(dim=1, dtype=torch.int32)}
    if with_most:
        counts["most experts"] = hits_BTE.sum(dim=2, dtype=torch.int32).amax().view(1)
    hits_BTP = hits_BTE
    for name, number in reversed(num_parts.items()):
        # [B, T/B, smaller parts] -> [B, T/B, P, parts of each] -> [B, T/B, P]
        hits_BTP = hits_BTP.unflatten(2, (number, -1)).any(dim=3)
        counts[name] = hits_BTP.sum(dim=1, dtype=torch.int32)
    return counts


class Copies(NamedTuple):
    """Copies of one chunk's rows, and the index back to the rows; int64.

    Memory is proportional to the copies, at most one per token-expert pair, and independent of W.

    Attributes:
        row: [M] source row of each copy; copies are ordered by part, then by row.
        by_row: [M] copies, ordered by row, then by part.
        row_starts: [N + 1] start of each row's copies in `by_row`, and the end.
        place: [M] position of each copy's expert in its row's list; None for parts of several
            experts.
    """

    row: torch.Tensor
    by_row: torch.Tensor
    row_starts: torch.Tensor
    place: torch.Tensor | None = None

    @classmethod
    def empty(cls, num_rows: int, num_copies: int, parts: Parts, device: torch.device) -> "Copies":
        """Uninitialised copies of one chunk."""
        sizes = cls.sizes(num_rows, num_copies, parts)
        return cls(*torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes))

    @staticmethod
    def sizes(num_rows: int, num_copies: int, parts: Parts) -> list[int]:
        """Lengths of the index tensors."""
        of_experts = [num_copies] if parts.size == 1 else []
        return [num_copies, num_copies, num_rows + 1, *of_experts]

    def sum_by_row(
        self, copies: torch.Tensor, dtype: torch.dtype, index_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add the copies of each row in the order of their parts: [M, H] -> [N, H] in `dtype`.

        Args:
            copies: [M, H], or more rows, of which `index_M` names the copies.
            dtype: dtype of the sum.
            index_M: row of each copy in `copies`; None if they are in order.
        """
        order_M = self.by_row
        if copies.dtype != dtype:
            copies = (copies if index_M is None else copies[index_M]).to(dtype)
        elif index_M is not None:
            order_M = index_M[order_M]
        return sum_rows(copies, order_M, self.row_starts)


class PartBounds(NamedTuple):
    """Bounds of the parts of a `Duplicate` on the device, for all chunks.

    Attributes:
        bounds: [most N, P + 1] first expert of each part, and the end of the last part.
        numbers: 0, 1, 2, ... up to the most rows or copies.
    """

    bounds: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, parts: Parts, num_rows: int, num_copies: int, ids: torch.Tensor) -> "PartBounds":
        """For chunks of at most `num_rows` and `num_copies`, in the dtype and device of `ids`."""
        end = parts.first + parts.size * parts.num_parts
        bounds = torch.arange(parts.first, end + 1, parts.size, dtype=ids.dtype, device=ids.device)
        return cls(
            bounds.expand(num_rows, -1).contiguous(),
            torch.arange(max(num_rows, num_copies) + 1, device=ids.device),
        )


def find_copies(ids_NW: torch.Tensor, parts: PartBounds, copies: Copies) -> None:
    """Derive the copies of rows from their experts.

    Hand-worked: two rows with ids [1 4 5] and [0 5 -], two parts of experts 0-3 and 4-7. The
    places where experts 0, 4 and 8 would stand are [0 1 3] and [0 1 2], so both rows have experts
    in both parts: the copies are row 0, row 1 for the first part, then row 0, row 1 for the second.

    Args:
        ids_NW: ascending experts of each row, padded with a number beyond the last expert.
        parts: the parts of the stage.
        copies: receives the result; its sizes are known from the counts.
    """
    num_rows, num_copies = len(ids_NW), len(copies.row)
    # [N, P + 1] -> [P + 1, N]
    places_P1N = torch.searchsorted(ids_NW.contiguous(), parts.bounds[:num_rows]).T.contiguous()
    is_copy_PN = places_P1N[1:] > places_P1N[:-1]
    copies_so_far = is_copy_PN.flatten().cumsum(dim=0)
    # In [P, N], flattened.
    position_M = torch.searchsorted(copies_so_far, parts.numbers[1 : num_copies + 1])
    torch.remainder(position_M, max(num_rows, 1), out=copies.row)
    if copies.place is not None:
        torch.index_select(places_P1N.flatten(), 0, position_M, out=copies.place)
        # If ids and counts disagree, stay inside the lists.
        copies.place.clamp_(max=ids_NW.shape[1] - 1)
    # Reuse `position_M` for the rows in ascending order.
    torch.sort(copies.row, stable=True, out=(position_M, copies.by_row))
    torch.searchsorted(position_M, parts.numbers[: num_rows + 1], out=copies.row_starts)


def copy_rows(into_NH: torch.Tensor, rows_MH: torch.Tensor, index_N: torch.Tensor) -> None:
    """Gather rows: into[n] = rows[index[n]]; tensors may lack the axis H."""
    into_NH, rows_MH = _in_wide_values(into_NH, rows_MH)
    torch.index_select(rows_MH, 0, index_N, out=into_NH)


def put_rows(into_MH: torch.Tensor, index_N: torch.Tensor, rows_NH: torch.Tensor) -> None:
    """Scatter rows: into[index[n]] = rows[n]; tensors may lack the axis H."""
    into_MH, rows_NH = _in_wide_values(into_MH, rows_NH)
    into_MH.index_copy_(0, index_N, rows_NH)


def _in_wide_values(into: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View both as 16-byte values, if all their rows begin and end at multiples of 16 bytes.

    torch's kernels copy value by value. The same bytes as fewer, wider values take a quarter of the
    time on a CPU (1,350 rows of 4 KiB scattered).
    """
    if rows.dim() < 2:
        return into, rows
    sizes = [rows.shape[1]]
    for tensor in (into, rows):
        sizes += [tensor.stride(0), int(tensor.storage_offset())]
    if any(size * rows.element_size() % 16 for size in sizes):
        return into, rows
    return into.view(torch.complex128), rows.view(torch.complex128)
