"""What a rank counts before an exchange: one line of integers per rank.

    tokens, most experts, hash | experts, by block | node parts, by block | rank parts, by block

A section of parts exists only if one of the chains copies tokens for those parts. If no chain's
rows are tokens, nothing is counted by block.
"""

from collections.abc import Sequence

from monta_megatron.chains.chain import Chain
from monta_megatron.chains.layout import Layout

# A rank's tokens, the most experts of one of them, and the hash of what the ranks agree on.
HEAD_SIZE = 3


def part_sizes(chains: Sequence[Chain], layout: Layout) -> dict[str, int]:
    """ "node", "rank" -> how many there are; only those that a chain copies tokens for."""
    named = {part for chain in chains for part in chain.parts}
    sizes = {"node": layout.num_nodes, "rank": layout.ep}
    return {part: size for part, size in sizes.items() if part in named}


def num_counted_blocks(chains: Sequence[Chain], num_blocks: int) -> int:
    """How many token blocks are counted: only chains whose rows are tokens need more than one."""
    return num_blocks if any(chain.rows == "tokens" for chain in chains) else 1


def count_widths(chains: Sequence[Chain], layout: Layout, num_blocks: int) -> list[int]:
    """Integers in each section of a rank's line.

    Args:
        chains: the candidates, one of which will run.
        layout: any rank's place.
        num_blocks: B, the number of token blocks.
    """
    blocks = num_counted_blocks(chains, num_blocks)
    sections = (layout.num_experts, *part_sizes(chains, layout).values())
    return [HEAD_SIZE, *(blocks * size for size in sections)]
