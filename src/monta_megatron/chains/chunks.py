"""How rows are split into chunks, and where those of each chunk belong in stock's order. No torch.

Notation: C = number of chunks, B = number of token blocks, S = source ranks, L = local experts per
EP rank.
"""

from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains.stages import RowCounts, Segments


def split(rows: RowCounts, num_chunks: int) -> RowCounts:
    """Split every count into `num_chunks` parts: equal ones, then one of half their size.

    Each source's rows for each expert are split separately, so a chunk holds the same share of all
    of them, and every rank knows every split from the counts alone. The remainders of neighbouring
    experts fall into different chunks; without that the last chunk would collect them all.

    The last chunk is smaller because nothing hides what comes after its collective; transposed
    passes take it first (`chains/lower.py`).

    Args:
        rows: [..., L] counts.
        num_chunks: C.

    Returns:
        [C + 1, ..., L] where the chunks begin and end: from 0 to `rows`.
    """
    halves = 2 * num_chunks - 1
    steps = 2 * np.arange(num_chunks + 1).reshape(-1, *[1] * rows.ndim)
    if np.issubdtype(rows.dtype, np.floating):
        return np.minimum(steps * rows / halves, rows)
    return np.minimum((steps * rows + np.arange(rows.shape[-1]) % halves) // halves, rows)


# Least number of token blocks to count for several chunks; a chunk is made of whole blocks.
NUM_BLOCKS = 8


def blocks_for(num_chunks: int) -> int:
    """B: how many token blocks are counted for a chain that may run in `num_chunks` chunks."""
    return 1 if num_chunks == 1 else max(NUM_BLOCKS, num_chunks)


@cache
def first_blocks(num_blocks: int, num_chunks: int) -> NDArray[np.int64]:
    """[C] the first block of each chunk, where chunks are made of whole blocks; see `split`."""
    first = np.rint(2 * num_blocks * np.arange(num_chunks) / (2 * num_chunks - 1))
    return first.astype(np.int64)


def starts_of(lengths: RowCounts) -> RowCounts:
    """First row of each run when runs of `lengths` lie one after the other, in flat order."""
    flat = lengths.ravel()
    return (np.cumsum(flat) - flat).reshape(lengths.shape)


def expert_order(runs: RowCounts, source_order: NDArray[np.int64], classes: int) -> Segments:
    """Where the rows of each chunk belong in stock's order on the experts' side.

    Args:
        runs: [C, L, S] rows of each chunk, as they lie in it: by expert, then by source.
        source_order: the sources in stock's order, (ETP rank, EP rank), as positions in S.
        classes: kinds of permuted tokens, see `TokenCounts`.

    Returns:
        Runs in the order (expert, source in stock's order, class, chunk): each after those of the
        earlier chunks.
    """
    return Segments(
        lengths=runs.reshape(len(runs), -1),
        find_starts=partial(_expert_starts, runs, source_order, classes),
    )


def _expert_starts(runs: RowCounts, source_order: NDArray[np.int64], classes: int) -> RowCounts:
    num_chunks, num_experts, num_sources = runs.shape
    by_class = runs.reshape(num_chunks, num_experts // classes, classes, num_sources)
    # K = classes. [C, L/K, K, S] -> [L/K, S in stock's order, K, C], laid end to end, and back
    starts = starts_of(by_class[..., source_order].transpose(1, 3, 2, 0)).transpose(3, 0, 2, 1)
    return starts[..., np.argsort(source_order)].reshape(num_chunks, -1)
