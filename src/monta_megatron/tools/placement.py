"""Expert placement: an order of a layer's experts in which tokens need fewer nodes and ranks.

An exchange that sends one copy of a token to each part of the experts (a node, a rank) sends as
many as there are parts with an expert of that token. Experts that tokens choose together
collaborate (Occult, arXiv 2505.13345): in one part they share a copy.

Experts are split among the nodes, then those of each node among its ranks: greedily, by how often
tokens choose them together, then by swaps of two experts while these save copies, which are counted
exactly. The load is a constraint: the busiest rank gets at most 1.1 times the mean of the
token-expert pairs, or what it gets today where that is more.

A group-limited router chooses among groups of consecutive experts, so groups stay together: whole
groups are split among parts that are as large as a group or larger, else the experts of each group.

Notation: T = tokens, E = experts, U = units (experts, or groups of them), P = parts of equal size.
routing_TE: whether a token goes to an expert; needs_TU: whether a token needs a unit; pairs_U and
part_U: token-expert pairs and part of each unit; max_pairs: limit of token-expert pairs per part.
"""

import numpy as np
from numpy.typing import NDArray

RoutingMap = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

MAX_LOAD = 1.1
# A token-expert pair above the limit of the load outweighs so many copies.
COPIES_PER_EXCESS_PAIR = 1e3
# Copies are whole numbers; the limit of the load is not.
MIN_GAIN = 1e-3


def copies_per_token(routing_TE: RoutingMap, num_parts: int) -> float:
    """Mean number of parts with an expert of a token.

    Args:
        routing_TE: [T, E] whether a token goes to an expert; a part has E / P consecutive ones.
        num_parts: P.
    """
    by_part = routing_TE.reshape(len(routing_TE), num_parts, -1)
    return float(by_part.any(axis=2).sum(axis=1).mean())


def busiest_load(routing_TE: RoutingMap, num_parts: int) -> float:
    """Token-expert pairs of the busiest part over their mean; arguments as `copies_per_token`."""
    pairs_P = routing_TE.reshape(len(routing_TE), num_parts, -1).sum(axis=(0, 2))
    return float(pairs_P.max() / pairs_P.mean())


def place_experts(
    routing_TE: RoutingMap,
    num_nodes: int,
    num_ranks: int,
    num_groups: int = 1,
    max_load: float = MAX_LOAD,
) -> Ints:
    """Order of experts in which tokens need few nodes and, within them, few ranks.

    Args:
        routing_TE: [T, E] whether a token goes to an expert.
        num_nodes: nodes of the exchange; divides `num_ranks`.
        num_ranks: EP ranks of the exchange; divides E.
        num_groups: expert groups of the router, a divisor or multiple of both; 1 without groups.
        max_load: load of the busiest rank, relative to the mean, that is always allowed.

    Returns:
        [E] expert at each position; rank r holds the r-th part of the positions. The present order
        where the load allows no order that saves copies.
    """
    num_experts = routing_TE.shape[1]
    blocks = [np.arange(num_experts)]
    for num_parts in sorted({num_nodes, num_groups, num_ranks} - {1}):
        # A node uses up half of what a rank may get above the mean.
        excess = (max_load - 1) / (1 if num_parts >= num_ranks else 2)
        limit = max(1 + excess, busiest_load(routing_TE, num_parts))
        max_pairs = limit * routing_TE.sum() / num_parts
        unit_size = num_experts // num_groups if num_parts <= num_groups else 1
        parts_per_block = num_parts // len(blocks)
        blocks = [
            block[part]
            for block in blocks
            for part in _split(routing_TE[:, block], unit_size, parts_per_block, max_pairs)
        ]
    order = np.concatenate(blocks)
    placed_TE = routing_TE[:, order]
    fits = busiest_load(placed_TE, num_ranks) <= max(max_load, busiest_load(routing_TE, num_ranks))
    before, after = (
        [copies_per_token(map_TE, number) for number in (num_nodes, num_ranks)]
        for map_TE in (routing_TE, placed_TE)
    )
    gains = after[0] <= before[0] and sum(after) < sum(before)
    return order if fits and gains else np.arange(num_experts)


def _split(routing_TE: RoutingMap, unit_size: int, num_parts: int, max_pairs: float) -> list[Ints]:
    """Split a block of experts into parts: the positions of each part's experts, ascending.

    A unit is `unit_size` consecutive experts, which stay together.
    """
    by_unit = routing_TE.reshape(len(routing_TE), -1, unit_size)
    needs_TU, pairs_U = by_unit.any(axis=2).astype(np.float32), by_unit.sum(axis=(0, 2))
    # Tokens of a single unit need one part wherever it lies.
    needs_TU = needs_TU[needs_TU.sum(axis=1) > 1]

    part_U = _by_collaboration(needs_TU.T @ needs_TU, num_parts)
    part_U = _with_swaps(needs_TU, pairs_U, part_U, num_parts, max_pairs)
    experts = np.arange(routing_TE.shape[1]).reshape(-1, unit_size)
    return [experts[part_U == part].ravel() for part in range(num_parts)]


def _by_collaboration(together_UU: Floats, num_parts: int) -> Ints:
    """[U, U] tokens that need both -> [U] part of each unit, greedily.

    A part begins with the unit that collaborates most with all that are left, and takes the one
    that collaborates most with the part until it is full.
    """
    num_units = len(together_UU)
    together_UU = together_UU * (1 - np.eye(num_units, dtype=np.float32))
    part_U, is_left_U = np.full(num_units, -1), np.ones(num_units, dtype=np.bool_)
    for part in range(num_parts):
        affinity_U = together_UU[:, is_left_U].sum(axis=1)
        for place in range(num_units // num_parts):
            unit = int(np.where(is_left_U, affinity_U, -1).argmax())
            part_U[unit], is_left_U[unit] = part, False
            affinity_U = together_UU[unit] + (affinity_U if place else 0)
    return part_U


def _with_swaps(
    needs_TU: Floats, pairs_U: Ints, part_U: Ints, num_parts: int, max_pairs: float
) -> Ints:
    """Swap units of two parts as long as that lowers excess load, or else saves copies.

    Copies of different pairs of parts do not depend on each other, so in each round every part
    takes part in one swap at most, and their gains add up.
    """
    part_U = part_U.copy()
    while True:
        gain_UU = _gain_of_swaps(needs_TU, pairs_U, part_U, num_parts, max_pairs)
        swaps = np.argwhere(np.triu(gain_UU) > MIN_GAIN)
        if not len(swaps):
            return part_U
        is_free_P = np.ones(num_parts, dtype=np.bool_)
        for one, other in swaps[np.argsort(-gain_UU[swaps[:, 0], swaps[:, 1]], kind="stable")]:
            parts = part_U[[one, other]]
            if is_free_P[parts].all():
                is_free_P[parts] = False
                part_U[[one, other]] = parts[::-1]


def _gain_of_swaps(
    needs_TU: Floats, pairs_U: Ints, part_U: Ints, num_parts: int, max_pairs: float
) -> NDArray[np.float64]:
    """[U, U] copies and excess load, in copies, saved if two units swap; 0 within a part."""
    # [T, P] units of a part that a token needs
    counts_TP = needs_TU @ np.eye(num_parts, dtype=np.float32)[part_U]
    # Tokens that need only this unit of its part no longer need the part, unless they need the
    # other unit; tokens that need this unit and nothing of the other part need that one too.
    alone_TU = needs_TU * (counts_TP[:, part_U] == 1)
    leave_UU = alone_TU.sum(axis=0)[:, None] - alone_TU.T @ needs_TU
    enter_UU = (needs_TU.T @ (counts_TP == 0).astype(np.float32))[:, part_U]

    load_U = np.bincount(part_U, weights=pairs_U, minlength=num_parts)[part_U]
    swapped_UU = load_U[:, None] - pairs_U[:, None] + pairs_U[None, :]
    relief_UU = np.maximum(load_U - max_pairs, 0)[:, None] - np.maximum(swapped_UU - max_pairs, 0)

    gain_UU = leave_UU - enter_UU + COPIES_PER_EXCESS_PAIR * relief_UU
    gain_UU = gain_UU + gain_UU.T
    gain_UU[part_U[:, None] == part_U[None, :]] = 0
    return gain_UU
