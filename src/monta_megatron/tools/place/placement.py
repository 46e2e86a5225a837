"""Expert placement: equal parts of experts such that tokens need few parts, and its file.

An exchange that sends one copy of a token to each part of the experts (a rank, a node) sends as
many as the token has parts with an expert of its. Experts that tokens choose together collaborate
(Occult, arXiv 2505.13345): within a part it saves copies, across parts it costs them.

Nodes first, then the ranks of each node: experts are put into parts greedily, by how often tokens
choose them together with those of the part, then swapped as long as a swap saves copies, which are
counted exactly. Load is a constraint: no part may get more than `max_load` times the mean of the
token-expert pairs.

A group-limited router chooses among groups of consecutive experts. Groups then stay together: while
a part is as large as a group or larger, whole groups are placed, and experts only within a group.

Notation: T = tokens, E = experts, k = experts per token, U = units (experts, or groups of
them), P = equal parts of the experts, in order.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monta_megatron.common import files
from monta_megatron.common.files import write_whole
from monta_megatron.planner.routing import UniformRouting

Routings = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Collaboration:
    """Parts that a layer's tokens need of P parts of its experts, beside uniform routing.

    Attributes:
        copies: parts per token that hold an expert of its.
        uniform_copies: the same, were experts chosen at random.
        intra: share of the pairs of experts of a token that lie in one part.
        uniform_intra: the same, were experts chosen at random.
        load: token-expert pairs of the busiest part over their mean.
    """

    copies: float
    uniform_copies: float
    intra: float
    uniform_intra: float
    load: float

    @property
    def inter(self) -> float:
        """Share of the pairs of experts of a token that lie in two parts."""
        return 1 - self.intra


def collaboration(routing_map: Routings, num_parts: int, uniform: UniformRouting) -> Collaboration:
    """Collaboration of the experts of a layer.

    Args:
        routing_map: [T, E] whether a token goes to an expert; T is at least 1.
        num_parts: P.
        uniform: routing of the same router at random.
    """
    # [T, E] -> [T, P] experts of a token in each part
    chosen = routing_map.reshape(len(routing_map), num_parts, -1).sum(axis=2, dtype=np.int64)
    topk = chosen.sum(axis=1)
    pairs = (topk * (topk - 1)).sum()
    load = chosen.sum(axis=0)
    together = (chosen * (chosen - 1)).sum()
    return Collaboration(
        copies=float((chosen > 0).sum(axis=1).mean()),
        uniform_copies=float(uniform.hits(num_parts).sum()),
        intra=float(together / pairs) if pairs else 1.0,
        uniform_intra=_uniform_intra(num_parts, uniform),
        load=float(load.max() / load.mean()) if load.any() else 1.0,
    )


def _uniform_intra(num_parts: int, uniform: UniformRouting) -> float:
    """Chance that two experts of a token lie in one part: those next to a first one, of all.

    Of the other allowed experts each is as likely. Those of the first one's group are allowed,
    and those of another group if it is one of the `group_topk - 1` besides.
    """
    groups, group_topk = uniform.num_groups, uniform.group_topk
    part, group = uniform.num_experts // num_parts, uniform.num_experts // groups
    if group_topk * group == 1:
        return 1.0
    others = max(part - group, 0)
    share = (group_topk - 1) / (groups - 1) if groups > 1 else 0.0
    return (min(part, group) - 1 + others * share) / (group_topk * group - 1)


def co_activation(routing_map: Routings) -> NDArray[np.float64]:
    """[T, E] -> [E, E] share of the tokens that go to both experts; on the diagonal, to one."""
    chosen = routing_map.astype(np.float32)
    shares: NDArray[np.float64] = (chosen.T @ chosen).astype(np.float64) / max(len(chosen), 1)
    return shares


Ints = NDArray[np.int64]

# Of what a rank may get above the mean, a node may get half, so that its ranks have some room.
NODE_SHARE_OF_EXCESS = 0.5
# Copies are whole numbers, and the limit of the load is not.
LEAST_GAIN = 1e-3


def place_experts(
    routing_map: Routings, num_nodes: int, num_ranks: int, max_load: float, num_groups: int = 1
) -> Ints:
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


def _split(routing_map: Routings, unit_size: int, num_parts: int, most_pairs: float) -> list[Ints]:
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


def _by_collaboration(together: NDArray[np.float32], num_parts: int) -> Ints:
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
    needs: NDArray[np.float32], pairs: Ints, part_of: Ints, num_parts: int, most_pairs: float
) -> Ints:
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
        # Load comes first. Load that no swap relieves any more is left to the caller.
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
    pairs: Ints, part_of: Ints, load: NDArray[np.float64], most_pairs: float
) -> NDArray[np.float64]:
    """[U, U] load above the limit that goes if units i and j change places; 0 within a part."""
    over = np.maximum(load - most_pairs, 0)[part_of]
    moved = pairs[None, :] - pairs[:, None]
    left = np.maximum(load[part_of][:, None] + moved - most_pairs, 0)
    relief: NDArray[np.float64] = over[:, None] + over[None, :] - left - left.T
    relief[part_of[:, None] == part_of[None, :]] = 0
    return relief


def _saved_by_swap(
    needs: NDArray[np.float32], part_of: Ints, num_parts: int
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
    needs: NDArray[np.float32], pairs: Ints, part_of: Ints, num_parts: int, most_pairs: float
) -> tuple[float, float]:
    """Load above the limit, then copies."""
    load = np.bincount(part_of, weights=pairs, minlength=num_parts)
    counts = needs @ np.eye(num_parts, dtype=np.float32)[part_of]
    return float(np.maximum(load - most_pairs, 0).sum()), float((counts > 0).sum())


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Orders of experts.

    Attributes:
        model: whose experts they are.
        num_experts: E.
        layers: layer, counted from 0 -> [E] the expert that comes to each position.
    """

    model: str
    num_experts: int
    layers: Mapping[int, list[int]]

    def inverse(self) -> "Placement":
        """The placement that undoes this one."""
        layers = {
            layer: sorted(range(self.num_experts), key=order.__getitem__)
            for layer, order in self.layers.items()
        }
        return Placement(model=self.model, num_experts=self.num_experts, layers=layers)


def write_placement(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document of `monta place --json`, one line for each field and layer.

    Raises:
        ValueError: it cannot be written.
    """
    layers = [f'    "{layer}": {order}' for layer, order in document["placement"].items()]
    fields = [
        f'  "{name}": {json.dumps(value)}'
        for name, value in document.items()
        if name != "placement"
    ]
    fields.append('  "placement": {\n' + ",\n".join(layers) + "\n  }")
    write_whole(path, "{\n" + ",\n".join(fields) + "\n}\n")


def read_placement(path: Path) -> Placement:
    """Read a placement.

    Raises:
        ValueError: one line that names file, field and rule.
    """
    document = files.read(path)

    def field(name: str, kind: type, rule: str) -> Any:
        value = document.get(name) if isinstance(document, dict) else None
        if type(value) is not kind or not value:
            raise ValueError(f"{path}: {name}: must be {rule}, in a file of monta place --out")
        return value

    num_experts = field("num_experts", int, "a number of experts")
    layers: dict[int, list[int]] = {}
    for name, order in field("placement", dict, "an order of experts for each layer").items():
        where = f"{path}: placement.{name}"
        if not name.isdecimal():
            raise ValueError(f"{where}: must be the number of a layer, counted from 0")
        if not isinstance(order, list) or any(type(expert) is not int for expert in order):
            raise ValueError(f"{where}: must be a list of experts")
        if sorted(order) != list(range(num_experts)):
            raise ValueError(
                f"{where}: is no permutation, must hold each expert from 0 to {num_experts - 1} "
                f"once; it has {len(order)} entries, {len(set(order))} of them different"
            )
        layers[int(name)] = order
    return Placement(
        model=field("model", str, "the name of a model"), num_experts=num_experts, layers=layers
    )
