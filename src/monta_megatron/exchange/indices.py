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
        copies: by position in the chain and chunk.
    """

    def __init__(self, bound: BoundChain, device: torch.device) -> None:
        self.memory: torch.Tensor | None = None
        self.copies: dict[tuple[int, int], Copies] = {}
        self._of_permutes: dict[int, torch.Tensor] = {}
        self._rows: dict[int, tuple[torch.Tensor, ...]] = {}
        # By position and chunk, or by position: how many numbers it takes.
        copies: dict[tuple[int, int], list[int]] = {}
        permutes: dict[int, int] = {}
        for position, stage in enumerate(bound.stages):
            before, after = bound.rows_at[position : position + 2]
            if stage.parts is not None:
                for chunk, (rows, num_copies) in enumerate(zip(before, after, strict=True)):
                    copies[position, chunk] = Copies.sizes(int(rows), int(num_copies), stage.parts)
            elif stage.segments is not None and not stage.segments.is_slice:
                permutes[position] = int(sum(after))
        sizes = [*chain.from_iterable(copies.values()), *permutes.values()]
        if not sizes:
            return
        self.memory = torch.empty(sum(sizes), dtype=torch.int64, device=device)
        pieces = iter(self.memory.split_with_sizes(sizes))
        for at, of_chunk in copies.items():
            self.copies[at] = Copies(*islice(pieces, len(of_chunk)))
        self._of_permutes = dict(zip(permutes, pieces, strict=True))

    def rows(self, position: int, segments: Segments) -> tuple[torch.Tensor, ...]:
        """[C][rows of the chunk] where the `Permute` at `position` takes or puts them."""
        if position not in self._rows:
            self._rows[position] = _row_indices(segments, self._of_permutes[position])
        return self._rows[position]


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
