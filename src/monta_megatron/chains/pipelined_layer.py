"""Order of steps in a layer whose experts are part of the pipeline. No torch.

A chunk consists of whole token blocks and is an exchange of its own. In step s

    first pass of chunk s starts | chunk s-1 is computed, its second starts | second of s-2 ends

Forward, the first pass is dispatch and the second one combine; backward, combine's backward and
dispatch's, in the same order over the chunks from the last to the first.

`exchange.streams` shows what waits for what.
"""

from itertools import pairwise
from typing import Literal, TypeAlias, get_args

from monta_megatron.chains.chain import order_of_issue

LayerStep: TypeAlias = Literal[
    "start first", "end first", "start experts", "end experts", "start second", "end second"
]
STEPS: tuple[LayerStep, ...] = get_args(LayerStep)


def pipelined_steps(num_chunks: int, in_background: bool = False) -> list[tuple[LayerStep, int]]:
    """(step, chunk) in the order of issue; backward mirrors it.

    Args:
        num_chunks: C.
        in_background: the experts compute asynchronously to the host, which would block on them if
            it continued with the same chunk.
    """
    offsets = (0, 1, 1, 2, 2, 3) if in_background else (0, 1, 1, 1, 1, 2)
    return [(STEPS[at], chunk) for at, chunk in order_of_issue(offsets, num_chunks)]


def blocks_of_chunks(num_blocks: int, num_chunks: int) -> list[tuple[int, int]]:
    """[C] first token block of each chunk, and the one after its last."""
    return list(pairwise(num_blocks * chunk // num_chunks for chunk in range(num_chunks + 1)))
