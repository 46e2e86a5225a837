"""Bytes of a row in transit: the lanes of each walk, and where they lie in a packed row.

A walk over a chain carries the hidden rows and, depending on the walk, the probabilities and the
lists of experts. The executor lays messages out with `offsets_bytes`, and the cost model takes
their sizes from `message_bytes_by_stage`: plain integers, free of torch.

Notation: H = hidden size, W = length of the lists of experts (0 where a row is a pair).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from monta_megatron.chains.chain import BoundChain
from monta_megatron.chains.stages import (
    AllGather,
    AllToAll,
    BoundStage,
    Replicate,
    first_place_copies,
)

ALIGNMENT_BYTES = 16
ID_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One of the four walks over a chain, and which lanes it carries besides the rows."""

    name: str
    transpose: bool
    probs: bool = False
    ids: bool = False


DISPATCH = Walk(name="dispatch", transpose=False, probs=True, ids=True)
COMBINE = Walk(name="combine", transpose=True)
DISPATCH_BACKWARD = Walk(name="dispatch_backward", transpose=True, probs=True)
COMBINE_BACKWARD = Walk(name="combine_backward", transpose=False)

FORWARD = (DISPATCH, COMBINE)
FORWARD_BACKWARD = (DISPATCH, COMBINE, COMBINE_BACKWARD, DISPATCH_BACKWARD)


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The values of a row.

    Attributes:
        hidden_size: H.
        value_bytes: bytes of each hidden value.
        prob_bytes: bytes of each probability.
        list_width: W where rows are tokens.
    """

    hidden_size: int
    value_bytes: int
    prob_bytes: int
    list_width: int

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a row's hidden values."""
        return self.hidden_size * self.value_bytes


def offsets_bytes(lanes: Sequence[tuple[int, int]]) -> list[int]:
    """Where each lane of a packed row begins, followed by the size of the row.

    Args:
        lanes: (number of values, bytes of a value) of each lane.
    """
    offsets, end = [], 0
    for num_values, value_bytes in lanes:
        end = _round_up(end, value_bytes)
        offsets.append(end)
        end += num_values * value_bytes
    return [*offsets, _round_up(end, ALIGNMENT_BYTES)]


def message_bytes_by_stage(bound: BoundChain, row: RowFormat, walk: Walk) -> list[tuple[int, ...]]:
    """Bytes of a row after each stage of the walk, in the walk's order, message by message.

    The lanes share a message where a stage copies rows anyway and a collective comes next;
    elsewhere they are sent in place, lane by lane.
    """
    stages = bound.stages[::-1] if walk.transpose else bound.stages
    has_lists = bound.chain.rows == "tokens"
    # On the source side of "copy per expert" a row has a list, on the other one probability.
    lists = has_lists and not walk.transpose
    found: list[tuple[int, ...]] = []
    for position, stage in enumerate(stages):
        copies = first_place_copies(stages) if position == 0 else isinstance(stage.stage, Replicate)
        if isinstance(stage.stage, Replicate) and stage.stage.part == "expert":
            lists = walk.transpose
        if copies or position == 0:
            to_collective = position + 1 < len(stages) and _is_collective(stages[position + 1])
            lanes = _lanes(row, walk, lists)
            packed = copies and bound.packs and to_collective and len(lanes) > 1
            found.append((offsets_bytes(lanes)[-1],) if packed else _bytes_of(lanes))
        elif position == len(stages) - 1:
            found.append(_bytes_of(_lanes(row, walk, lists)))
        else:
            found.append(found[-1])
    return found


def _lanes(row: RowFormat, walk: Walk, lists: bool) -> list[tuple[int, int]]:
    lanes = [(row.hidden_size, row.value_bytes)]
    if walk.probs:
        lanes.append((row.list_width if lists else 1, row.prob_bytes))
    if walk.ids and lists:
        lanes.append((row.list_width, ID_BYTES))
    return lanes


def _bytes_of(lanes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(num_values * value_bytes for num_values, value_bytes in lanes)


def _is_collective(stage: BoundStage) -> bool:
    return isinstance(stage.stage, AllToAll | AllGather)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
