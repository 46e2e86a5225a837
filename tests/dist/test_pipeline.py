"""Planted faults of every pass are found by the comparison with stock."""

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from layers import Case, check, compare, gathered
from pool import on_ranks
from self_checks import FAULTS

from monta_megatron.chains.program import BoundProgram

CASE = Case(tp=2, ep=2, etp=2, num_chunks=4, checked=False)


def wrong_split() -> Any:
    """Every rank sends the first peer a row that belongs to the second, and expects no other."""
    original_rows, original_splits = BoundProgram.rows, BoundProgram.splits

    def more(self: BoundProgram) -> int:
        return {0: 1, 1: -1}.get(self.bound.layout.rank, 0)

    def rows(self: BoundProgram, buffer: Any) -> float:
        num_peers = self.bound.layout.ep if buffer.name == "alltoall" else 0
        return original_rows(self, buffer) + num_peers * more(self)

    def splits(self: BoundProgram, operation: Any) -> tuple[list[int], list[int]]:
        (first, second, *others), receive = original_splits(self, operation)
        return [first + 1, second - 1, *others], [count + more(self) for count in receive]

    return mock.patch.multiple(BoundProgram, rows=rows, splits=splits)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("experts swapped", "rows"),
        ("row written twice", "rows"),
        ("chunk of dispatch missing", "rows"),
        ("neighbour's probability", "probs"),
        ("chunk of combine backward missing", "expert_gradient"),
        ("chunk of dispatch backward missing", "input"),
        ("probabilities of dispatch backward missing", "prob_gradient"),
    ],
)
@on_ranks(4)
def test_a_planted_fault_is_found(fault: str, name: str) -> None:
    """On the ranks whose tokens it meets."""
    with FAULTS[fault](""):
        found = "\n".join(map("\n".join, gathered(check(CASE))))
    assert re.search(name + r": \d+ of \d+ values differ .* first at \[\d+", found), found


@on_ranks(4)
def test_a_wrong_split_is_found() -> None:
    # Without an AllGather behind it the wrong number of rows meets the copy into place.
    with wrong_split(), pytest.raises((RuntimeError, IndexError), match="index_copy_"):
        compare(replace(CASE, etp=1))
