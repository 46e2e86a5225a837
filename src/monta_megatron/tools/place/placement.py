"""Which experts to put together: equal parts of them that tokens need few of.

Nodes first, then the ranks of each node: experts are put into parts greedily, by how often tokens
choose them together with those of the part (as Occult does, arXiv 2505.13345), then swapped as long
as a swap saves copies, which are counted exactly. Load is a constraint: no part may get more than
`max_load` times the mean of the token-expert pairs.

A group-limited router chooses among groups of consecutive experts. Groups then stay together: while
a part is as large as a group or larger, whole groups are placed, and experts only within a group.

Notation: T = tokens, E = experts, U = units (experts, or groups of them), P = parts.
"""

import numpy as np
from numpy.typing import NDArray

Routings = NDArray[np.bool_]
Indices = NDArray[np.int64]

# Of what a rank may get above the mean, a node may get half, so that its ranks have some room.
NODE_SHARE_OF_EXCESS = 0.5
# Copies are whole numbers, and the limit of the load is not.
LEAST_GAIN = 1e-3


def place_experts(
    routing_map: Routings,
    num_nodes: int,
    num_ranks: int,
    max_load: float,
    num_groups: int = 1,
) -> Indices:
    """The order of experts in which tokens need few nodes and, within them, few ranks.

    Args:
        routing_map: [T, E] whether a token goes to an expert.
        num_nodes: nodes of the exchange; it divides `num_ranks`.
        num_ranks: EP ranks of the exchange; it divides E.
        max_load: most token-expert pairs of a rank, over the mean.
        num_groups: groups of the router; 1 where it has none.

    Returns:
        [E] the expert that comes to each position; rank r has the r-th part of the positions.
    """
    num_experts = routing_map.shape[1]
    blocks = [np.arange(num_experts)]
    # Each number of parts divides the next; a level of groups keeps them together.
    for num_parts in sorted({num_nodes, num_ranks, num_groups} - {1}):
        of_groups = num_parts <= num_groups
        unit_size = num_experts // num_groups if of_groups else 1
        excess = (max_load - 1) * (1 if num_parts >= num_ranks else NODE_SHARE_OF_EXCESS)
        most_pairs = (1 + excess) * routing_map.sum() / num_parts
        blocks = [
            block[part]
            for block in blocks
            for part in _split(
                routing_map[:, block], unit_size, num_parts // len(blocks), most_pairs
            )
        ]
    return np.concatenate(blocks)


def _split(
    routing_map: Routings, unit_size: int, num_parts: int, most_pairs: float
) -> list[Indices]:
    """Split a block of experts into parts: the positions of each part's experts, ascending.

    Args:
        routing_map: [T, experts of the block].
        unit_size: consecutive experts that stay together.
        num_parts: P.
        most_pairs: most token-expert pairs of a part.
    """
    by_unit = routing_map.reshape(len(routing_map), -1, unit_size)
    num_units = by_unit.shape[1]
    # [T, U] which units a token needs, and [U] how many pairs a unit gets
    needs, pairs = by_unit.any(axis=2).astype(np.float32), by_unit.sum(axis=(0, 2))
    needs = needs[needs.sum(axis=1) > 1]
    as_they_are = np.repeat(np.arange(num_parts), num_units // num_parts)
    placed = _with_swaps(
        needs, pairs, _by_collaboration(needs.T @ needs, num_parts), num_parts, most_pairs
    )
    part_of = min(
        (as_they_are, placed), key=lambda end: _cost(needs, pairs, end, num_parts, most_pairs)
    )
    # Part p is the one whose first unit comes p-th: experts stay where they are if nothing is won.
    first_unit = [int(np.flatnonzero(part_of == part)[0]) for part in range(num_parts)]
    experts = np.arange(routing_map.shape[1]).reshape(num_units, unit_size)
    return [experts[part_of == part].ravel() for part in np.argsort(first_unit)]


def _by_collaboration(together: NDArray[np.float32], num_parts: int) -> Indices:
    """[U, U] tokens that need both -> [U] part of each unit, greedily.

    A part begins with the unit that collaborates most with all that are left, and takes the one
    that collaborates most with the part until it is full.
    """
    num_units = len(together)
    together = together * (1 - np.eye(num_units, dtype=np.float32))
    part_of, is_left = np.full(num_units, -1), np.ones(num_units, dtype=np.bool_)
    for part in range(num_parts):
        affinity = together[:, is_left].sum(axis=1)
        for place in range(num_units // num_parts):
            unit = int(np.where(is_left, affinity, -1).argmax())
            part_of[unit], is_left[unit] = part, False
            affinity = together[unit] if place == 0 else affinity + together[unit]
    return part_of


def _with_swaps(
    needs: NDArray[np.float32],
    pairs: Indices,
    part_of: Indices,
    num_parts: int,
    most_pairs: float,
) -> Indices:
    """Swap units of two parts while it lowers the load above the limit, or else saves copies.

    Copies of different pairs of parts do not depend on each other, so in each round every part
    takes part in one swap at most, and their savings add up.

    Args:
        needs: [T, U] whether a token needs a unit.
        pairs: [U] token-expert pairs.
        part_of: [U] part of each unit.
        num_parts: P.
        most_pairs: most of a part.
    """
    part_of = part_of.copy()
    while True:
        load = np.bincount(part_of, weights=pairs, minlength=num_parts)
        saved = _saved_by_swap(needs, part_of, num_parts)
        relief = _relief_by_swap(pairs, part_of, load, most_pairs)
        # Load comes first. What no swap relieves any more is left to whoever asked.
        is_over = bool(relief.max(initial=0) > LEAST_GAIN)
        gain = relief if is_over else np.where(relief < -LEAST_GAIN, 0, saved)
        gain[part_of[:, None] == part_of[None, :]] = 0
        swaps = np.argwhere(np.triu(gain) > LEAST_GAIN)
        if not len(swaps):
            return part_of
        is_free = np.ones(num_parts, dtype=np.bool_)
        for one, other in swaps[np.argsort(-gain[swaps[:, 0], swaps[:, 1]], kind="stable")]:
            parts = part_of[[one, other]]
            if is_free[parts].all():
                is_free[parts] = False
                part_of[[one, other]] = parts[::-1]


def _relief_by_swap(
    pairs: Indices, part_of: Indices, load: NDArray[np.float64], most_pairs: float
) -> NDArray[np.float64]:
    """[U, U] load above the limit that goes if units i and j change places; 0 within a part."""
    over = np.maximum(load - most_pairs, 0)[part_of]
    moved = pairs[None, :] - pairs[:, None]
    left = np.maximum(load[part_of][:, None] + moved - most_pairs, 0)
    relief: NDArray[np.float64] = over[:, None] + over[None, :] - left - left.T
    relief[part_of[:, None] == part_of[None, :]] = 0
    return relief


def _saved_by_swap(
    needs: NDArray[np.float32], part_of: Indices, num_parts: int
) -> NDArray[np.float32]:
    """[U, U] copies saved if units i and j change places; meaningless within a part.

    A part is no longer needed by tokens that need only i of it, unless they need j too; and it is
    needed by tokens that need j, and nothing of it before.
    """
    of_part = np.eye(num_parts, dtype=np.float32)[part_of]
    # [T, P] units of a part that a token needs
    counts = needs @ of_part
    alone = needs * (counts[:, part_of] == 1)
    # [U, U] tokens that i leaves, and that j does not hold back
    leaves = alone.sum(axis=0)[:, None] - alone.T @ needs
    # [U, P] -> [U, U] tokens that bring i's new part, that of j, a copy
    enters = (needs.T @ (counts == 0).astype(np.float32))[:, part_of]
    saved = leaves - enters
    return saved + saved.T


def _cost(
    needs: NDArray[np.float32],
    pairs: Indices,
    part_of: Indices,
    num_parts: int,
    most_pairs: float,
) -> tuple[float, float]:
    """Load above the limit, then copies."""
    load = np.bincount(part_of, weights=pairs, minlength=num_parts)
    counts = needs @ np.eye(num_parts, dtype=np.float32)[part_of]
    return float(np.maximum(load - most_pairs, 0).sum()), float((counts > 0).sum())
