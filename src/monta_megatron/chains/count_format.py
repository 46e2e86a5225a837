"""What ranks count before an exchange, and what of it each rank is sent.

A rank counts all experts and the parts that the chains copy tokens for, by block. It sends every
rank one message of int32, as large as any other, with these columns for each block:

    head                 tokens, most experts of one of them, a hash: the same to all, in all blocks
    experts              token-expert pairs for each expert of that rank
    for_node             tokens for its node
    for_rank             tokens for itself; or, where tokens are copied for nodes first,
    for_node_ranks       for each rank of its node

Columns of parts exist only if one of the chains copies tokens for those parts. If no chain's rows
are tokens, nothing is counted by block.
"""

from collections.abc import Sequence

from monta_megatron.chains.chain import Chain
from monta_megatron.chains.layout import Layout

# Tokens of a rank, most experts of one of them, and two columns of what the ranks agree on.
HEAD_SIZE = 4
# A message counts tokens of one rank, which are checked to be at most so many, or experts of one
# token, which are fewer than a row of the routing map has bytes: int32 holds both. Sums over ranks
# are made on the host, in 64 bits.
COUNT_BYTES = 4
MOST_TOKENS = 2**31 - 1


def part_sizes(chains: Sequence[Chain], layout: Layout) -> dict[str, int]:
    """ "node", "rank" -> how many there are; only those that a chain copies tokens for."""
    named = {part for chain in chains for part in chain.parts}
    sizes = {"node": layout.num_nodes, "rank": layout.ep}
    return {part: size for part, size in sizes.items() if part in named}


def num_counted_blocks(chains: Sequence[Chain], num_blocks: int) -> int:
    """How many token blocks are counted: only chains whose rows are tokens need more than one."""
    return num_blocks if any(chain.rows == "tokens" for chain in chains) else 1


def message_columns(chains: Sequence[Chain], layout: Layout) -> dict[str, int]:
    """Columns of a message by section, in order.

    Args:
        chains: the candidates, one of which will run.
        layout: any rank's place.
    """
    parts = part_sizes(chains, layout)
    columns = {"head": HEAD_SIZE, "experts": layout.num_local_experts}
    if "node" in parts:
        columns["for_node"] = 1
    if "rank" in parts:
        columns |= {"for_node_ranks": layout.ranks_per_node} if "node" in parts else {"for_rank": 1}
    return columns


def message_size(chains: Sequence[Chain], layout: Layout, num_blocks: int) -> int:
    """Integers that a rank sends to each rank, for `num_blocks` token blocks."""
    blocks = num_counted_blocks(chains, num_blocks)
    return blocks * sum(message_columns(chains, layout).values())
