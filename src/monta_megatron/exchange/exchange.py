"""One micro-batch's exchange: state shared by its four passes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

import numpy as np
import torch

from monta_megatron.chains.chain import BoundChain, starts_of
from monta_megatron.chains.stages import RowCounts
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.rows import Copies


class Indices:
    """Copies and row indices of all stages, in one allocation.

    It is allocated on the stream that calls the first pass, and is split into views stage by stage,
    mostly while the first collective is in flight. Copies are written by the find operations of
    dispatch, row indices by `of_rows` at its first call for a stage.

    Attributes:
        memory: [any number] int64; None before the first pass, or if no stage needs any.
    """

    def __init__(self, bound: BoundChain) -> None:
        self._bound = bound
        # Integers of each stage, by its position.
        self._sizes: dict[int, int] = {}
        for position, stage in enumerate(bound.stages):
            before, after = bound.rows_at[position : position + 2]
            if stage.parts is not None:
                of_one = Copies.sizes(int(sum(before)), int(sum(after)), stage.parts)
                # Each chunk's `row_starts` has one entry more than rows.
                self._sizes[position] = sum(of_one) + bound.num_chunks - 1
            elif stage.segments is not None and not stage.segments.is_slice:
                self._sizes[position] = int(sum(before))
        # Of each stage, by its position and the chunk.
        self._copies: dict[int, list[Copies]] = {}
        self._rows: dict[int, tuple[torch.Tensor, ...]] = {}
        self.memory: torch.Tensor | None = None

    def allocate(self, device: torch.device) -> None:
        """Allocate the memory, if an earlier pass has not."""
        if self.memory is None and self._sizes:
            sizes = list(self._sizes.values())
            self.memory = torch.empty(sum(sizes), dtype=torch.int64, device=device)
            self._pieces = dict(zip(self._sizes, self.memory.split_with_sizes(sizes), strict=True))

    def copies(self, position: int, chunk: int) -> Copies:
        """Copies of a chunk by the `Duplicate` at `position`; written in dispatch."""
        if position not in self._copies:
            parts, rows_at = self._bound.stages[position].parts, self._bound.rows_at
            assert parts is not None, f"nothing is copied at {position}"
            chunks = zip(rows_at[position], rows_at[position + 1], strict=True)
            sizes = [Copies.sizes(int(before), int(after), parts) for before, after in chunks]
            pieces = iter(self._pieces[position].split_with_sizes(list(chain(*sizes))))
            self._copies[position] = [Copies(*islice(pieces, len(each))) for each in sizes]
        return self._copies[position][chunk]

    def of_rows(self, position: int) -> tuple[torch.Tensor, ...]:
        """[C][N] row indices of the chunks by the `Permute` at `position`."""
        if position not in self._rows:
            segments = self._bound.stages[position].segments
            assert segments is not None, f"no rows are indexed at {position}"
            self._rows[position] = _expand_runs(*segments.runs, self._pieces[position])
        return self._rows[position]


def _expand_runs(
    lengths_CR: RowCounts, starts_CR: RowCounts, into_N: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Expand the runs of all chunks to row indices: one copy to the device, no sync.

    [C, R] runs -> per chunk [N]: starts[c, 0], starts[c, 0] + 1, ..., starts[c, 1], ...
    """
    device, total = into_N.device, len(into_N)
    # Index of a row: its run's start, plus its offset in the run.
    shifts_CR = starts_CR - starts_of(lengths_CR)
    runs = torch.from_numpy(np.array([shifts_CR.ravel(), lengths_CR.ravel()]))
    if device.type == "cuda":
        # torch reuses pinned memory once the copy is complete.
        runs = runs.pin_memory().to(device, non_blocking=True)
    shifts_N = torch.repeat_interleave(runs[0], runs[1], output_size=total)
    torch.add(torch.arange(total, device=device), shifts_N, out=into_N)
    return into_N.split(lengths_CR.sum(axis=1).tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """One micro-batch's exchange, created before dispatch and kept until its backward pass.

    Attributes:
        bound_chain: the chain with this micro-batch's rows.
        groups: the process group for every group name of the chain.
        sum_dtype: dtype of the sums over copies of a row: fp32, or for permuted tokens, as in
            Megatron's reduction over ETP, the probabilities' dtype if it is wider.
        monitor: counts bytes and forwards events to its recorder, if any.
        max_experts_per_token: W, the most experts of any token; 0 where rows are permuted tokens.
        fused: use Triton kernels; see `exchange.kernels`.
    """

    bound_chain: BoundChain
    groups: Mapping[str, PeerGroup]
    sum_dtype: torch.dtype
    monitor: Monitor
    max_experts_per_token: int = 0
    fused: bool = False

    @cached_property
    def indices(self) -> Indices:
        """Row indices and copies; the first pass allocates them."""
        return Indices(self.bound_chain)
