"""It is really pipelined, in all four passes; and planted faults are found."""

import dataclasses
import re

import pytest
from faults import with_fault
from layers import Case, compare, mismatch, record_of_passes
from pool import Pools

CASE = Case(tp=2, ep=2, etp=2, num_local_experts=2)
NUM_CHUNKS = 4

# First and second collective of each pass, and from one chunk to the next: the chain forward, or
# its transpose, which takes the chunks from the last to the first.
PASSES = {
    "dispatch": ("alltoall", "allgather", 1),
    "combine": ("allgather", "alltoall", -1),
    "dispatch_backward": ("allgather", "alltoall", -1),
    "combine_backward": ("alltoall", "allgather", 1),
}


def assert_pipelined(record: list[tuple[str, str, str, int]], num_chunks: int) -> None:
    """The next chunk's first collective starts before a chunk's second one is waited for."""
    for pass_name, (first, second, step) in PASSES.items():
        for chunk in range(num_chunks)[::step][:-1]:
            started = record.index(("start", pass_name, first, chunk + step))
            waited = record.index(("wait", pass_name, second, chunk))
            assert started < waited, f"{pass_name}: chunk {chunk + step} starts too late"


def test_four_passes_are_pipelined(pools: Pools) -> None:
    for record in pools[4].run(record_of_passes, CASE, NUM_CHUNKS):
        assert_pipelined(record, NUM_CHUNKS)


def test_every_rank_issues_the_same_collectives_in_order(pools: Pools) -> None:
    # One rank has no token: what it issues may not depend on that.
    case = Case(tp=1, ep=2, etp=2, routing="rank0_empty")
    records = pools[4].run(record_of_passes, case, NUM_CHUNKS)
    assert all(record == records[0] for record in records)


def test_a_serial_loop_is_found(pools: Pools) -> None:
    records = pools[4].run(with_fault, "serial loop", record_of_passes, CASE, NUM_CHUNKS)
    with pytest.raises(AssertionError, match="starts too late"):
        assert_pipelined(records[0], NUM_CHUNKS)


@pytest.mark.parametrize(
    ("fault", "symptom"),
    [
        ("experts swapped", "expert_rows: "),
        ("row written twice", "expert_rows: "),
        ("chunk of dispatch missing", "expert_rows: "),
        ("neighbour's probability", "expert_probs: "),
        ("chunk of combine backward missing", "input_gradient: "),
        ("chunk of dispatch backward missing", "input_gradient: "),
        ("probabilities of dispatch backward missing", "input_gradient: "),
    ],
)
def test_a_planted_fault_is_found(pools: Pools, fault: str, symptom: str) -> None:
    for error in pools[4].run(with_fault, fault, mismatch, CASE, NUM_CHUNKS):
        assert re.search(rf"{symptom}\d+ of \d+ values differ .* first at \[\d+", error), error


def test_a_wrong_split_is_found(pools: Pools) -> None:
    # Without an AllGather behind it the wrong number of rows meets the copy into place.
    case = dataclasses.replace(CASE, etp=1)
    for error in pools[4].run(with_fault, "wrong split", mismatch, case, NUM_CHUNKS):
        assert "index_copy_" in error


def test_the_control_without_a_fault_passes(pools: Pools) -> None:
    pools[4].run(compare, CASE, [NUM_CHUNKS])
