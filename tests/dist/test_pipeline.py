"""It is really pipelined, in all four passes; and planted faults are found."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import dispatchers
import exchanges
import pytest
from layers import Case, build_layer, compare, forward_backward, gathered, same_on_all_ranks
from pool import on_ranks
from self_checks import FAULTS
from step_list import StepList

from monta_megatron.chains import lower
from monta_megatron.chains.program import BoundProgram

CASE = Case(tp=2, ep=2, etp=2, num_chunks=4)

# First and second collective of each pass, and from one chunk to the next: the chain forward, or
# its transpose, which takes the chunks from the last to the first.
PASSES = {
    "dispatch": ("alltoall", "allgather", 1),
    "combine": ("allgather", "alltoall", -1),
    "dispatch_backward": ("allgather", "alltoall", -1),
    "combine_backward": ("alltoall", "allgather", 1),
}


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


def serial_loop() -> Any:
    """No chunk starts before the one before it is done."""

    def order(offsets: Any, num_chunks: int) -> list[tuple[int, int]]:
        return [(stage, chunk) for chunk in range(num_chunks) for stage in range(len(offsets))]

    # Programs are cached whatever their order.
    structure = lower._structure.__wrapped__
    return mock.patch.multiple(lower, order_of_issue=order, _structure=structure)


def record_of_passes(case: Case) -> list[tuple[str, str, str, int]]:
    """Every step of a forward and backward pass, in the order of issue."""
    layer = build_layer(case)
    layer.token_dispatcher.monitor.recorder = steps = StepList()
    forward_backward(case, layer)
    return [
        (step.action, step.pass_name, step.operation.stage, step.operation.chunk) for step in steps
    ]


def assert_pipelined(record: list[tuple[str, str, str, int]]) -> None:
    """The next chunk's first collective starts before a chunk's second one is waited for."""
    for pass_name, (first, second, step) in PASSES.items():
        for chunk in range(4)[::step][:-1]:
            started = record.index(("start", pass_name, first, chunk + step))
            waited = record.index(("wait", pass_name, second, chunk))
            assert started < waited, f"{pass_name}: chunk {chunk + step} starts too late"


@on_ranks(4)
def test_four_passes_are_pipelined() -> None:
    assert_pipelined(record_of_passes(CASE))


@on_ranks(4)
def test_every_rank_issues_the_same_collectives_in_order() -> None:
    # One rank has no token: what it issues may not depend on that.
    same_on_all_ranks(record_of_passes(replace(CASE, tp=1, tokens=(0, 24, 24, 24))))


@on_ranks(4)
def test_a_serial_loop_is_found() -> None:
    with serial_loop(), pytest.raises(AssertionError, match="starts too late"):
        assert_pipelined(record_of_passes(CASE))


UNCHECKED = replace(CASE, checked=False)


@pytest.mark.parametrize(
    ("fault", "of_layer", "of_dispatcher"),
    [
        ("experts swapped", "output: ", "rows: "),
        ("row written twice", "output: ", "rows: "),
        ("chunk of dispatch missing", "output: ", "rows: "),
        ("neighbour's probability", "output: ", "probs: "),
        ("chunk of combine backward missing", "input: ", "expert_gradient: "),
        ("chunk of dispatch backward missing", "input: ", "token_gradient: "),
        ("probabilities of dispatch backward missing", "input: ", "prob_gradient: "),
    ],
)
@on_ranks(4)
def test_a_planted_fault_is_found(fault: str, of_layer: str, of_dispatcher: str) -> None:
    """By a layer and by the dispatcher's phases, on the ranks whose tokens it meets."""
    differ, error = r"\d+ of \d+ values differ .* first at \[\d+", ""
    with FAULTS[fault](""):
        try:
            compare(UNCHECKED, [4])
        except AssertionError as mismatch:
            error = str(mismatch)
        errors = "\n".join(gathered(error))
        found = "\n".join(map("\n".join, gathered(dispatchers.check(UNCHECKED))))
    assert re.search(of_layer + differ, errors), errors
    assert re.search(of_dispatcher + differ, found), found


@pytest.mark.parametrize(
    ("check_many", "kind"), [(exchanges.check_many, exchanges.Case), (dispatchers.check_many, Case)]
)
@on_ranks(4)
def test_every_case_with_a_missing_row_is_reported(
    check_many: Callable[[list[Any]], list[tuple[int, str]]], kind: type[exchanges.Case]
) -> None:
    """The rows of a chunk stay away."""
    options = {"checked": False} if kind is Case else {}
    case = kind(chain="hierarchical_alltoall", num_chunks=2, num_blocks=2, **options)
    with FAULTS["chunk of dispatch missing"](""):
        found = check_many([replace(case, seed=seed) for seed in range(3)])
    assert {position for position, _ in found} == {0, 1, 2}


@on_ranks(4)
def test_a_wrong_split_is_found() -> None:
    # Without an AllGather behind it the wrong number of rows meets the copy into place.
    with wrong_split(), pytest.raises((RuntimeError, IndexError), match="index_copy_"):
        compare(replace(UNCHECKED, etp=1), [4])


@on_ranks(4)
def test_the_control_without_a_fault_passes() -> None:
    compare(UNCHECKED, [4])
    assert not dispatchers.check(UNCHECKED)
