"""What the passes of an exchange share: where rows belong, and what is copied for whom.

It is one piece of memory, of the stream that calls the first pass.

Notation: C = number of chunks, N = runs of a chunk.
"""

from itertools import chain, islice

import numpy as np
import torch

from monta_megatron.chains.chain import BoundChain
from monta_megatron.chains.stages import Segments
from monta_megatron.exchange.copies import Copies


class Indices:
    """Row indices, written at their first use, and copies, written by dispatch.

    Attributes:
        memory: [any number] int64, what they lie in; None if there are none.
        copies: by position in the chain and chunk; views, each made at its first use.
    """

    def __init__(self, bound: BoundChain, device: torch.device) -> None:
        self.memory: torch.Tensor | None = None
        self.copies: dict[tuple[int, int], Copies] = {}
        self._rows: dict[int, tuple[torch.Tensor, ...]] = {}
        # By position: how many numbers it takes.
        sizes: dict[int, int] = {}
        for position, stage in enumerate(bound.stages):
            before, after = bound.rows_at[position : position + 2]
            if stage.parts is not None:
                of_one = Copies.sizes(int(sum(before)), int(sum(after)), stage.parts)
                # Each chunk's `row_starts` have one more than it has rows.
                sizes[position] = sum(of_one) + bound.num_chunks - 1
            elif stage.segments is not None and not stage.segments.is_slice:
                sizes[position] = int(sum(after))
        if not sizes:
            return
        self.memory = torch.empty(sum(sizes.values()), dtype=torch.int64, device=device)
        pieces = self.memory.split_with_sizes(list(sizes.values()))
        self._pieces = dict(zip(sizes, pieces, strict=True))
        self.copies = _AtFirstUse(bound, self._pieces)

    def rows(self, position: int, segments: Segments) -> tuple[torch.Tensor, ...]:
        """[C][rows of the chunk] where the `Permute` at `position` takes or puts them."""
        if position not in self._rows:
            self._rows[position] = _row_indices(segments, self._pieces[position])
        return self._rows[position]


class _AtFirstUse(dict[tuple[int, int], Copies]):
    """The copies of a stage are views, made for all chunks when the first is asked for.

    So those of later stages are made while the first collective is under way.
    """

    def __init__(self, bound: BoundChain, pieces: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._bound, self._pieces = bound, pieces

    def __missing__(self, at: tuple[int, int]) -> Copies:
        position, bound = at[0], self._bound
        parts = bound.stages[position].parts
        assert parts is not None, f"nothing is copied at {position}"
        before, after = bound.rows_at[position : position + 2]
        sizes = [
            Copies.sizes(int(rows), int(copies), parts)
            for rows, copies in zip(before, after, strict=True)
        ]
        views = iter(self._pieces[position].split_with_sizes([*chain.from_iterable(sizes)]))
        for chunk, of_chunk in enumerate(sizes):
            self[position, chunk] = Copies(*islice(views, len(of_chunk)))
        return self[at]


def _row_indices(segments: Segments, into: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Row numbers of every chunk from its runs; one copy to the device, and no sync.

    [C, N] runs -> per chunk [rows]: starts[c, 0], starts[c, 0] + 1, ..., starts[c, 1], ...
    """
    device, total = into.device, len(into)
    lengths = segments.lengths.ravel()
    # A row is its run's start plus its distance from the run's first row in the result.
    shifts = segments.starts.ravel() - (np.cumsum(lengths) - lengths)
    runs = torch.from_numpy(np.stack([shifts, lengths]))
    if device.type == "cuda":
        # torch keeps pinned memory for the next micro-batch, once the copy has been made.
        runs = runs.pin_memory().to(device, non_blocking=True)
    shift_of_row = torch.repeat_interleave(runs[0], runs[1], output_size=total)
    torch.add(torch.arange(total, device=device), shift_of_row, out=into)
    return into.split(segments.lengths.sum(axis=1).tolist())
