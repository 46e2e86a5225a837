"""What other work leaves over of measured times: by hand, and never against the plan."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from clusters import preset, workload_of

from monta_megatron.planner.online.tuning import LATE, Tuning, TuningCandidate, tuning_candidates
from monta_megatron.planner.online.tuning_report import plan_of_tuning, tuning_table
from monta_megatron.planner.plan import Plan, plan
from monta_megatron.planner.select import (
    OverlappedCompute,
    Selection,
    exposed_of,
    overlapped_compute_of,
    select_chain,
)
from monta_megatron.planner.workload import Workload

H100 = preset("h100_8x_ndr")
TWO_NODES = workload_of(16, tokens=2048, num_experts=128)
WORKLOADS = [TWO_NODES, workload_of(8), workload_of(16, topk=2), workload_of(4, 2, tokens=64)]
OVERLAPPED_COMPUTE_US = [1.0, 300.0, 1_000.0, 2_500.0, 6_000.0, 1e7]


def work(
    overlapped_compute_us: float, *program_us: float, around_us: float = 0.0
) -> OverlappedCompute:
    """As predicted where exchange and work do not slow each other."""
    part_us = overlapped_compute_us / len(program_us)
    left_us = (max(us - part_us, 0.0) for us in program_us)
    return OverlappedCompute(
        part_us=part_us,
        program_us=program_us,
        total_us=sum(program_us) + around_us,
        exposed_us=sum(left_us) + around_us,
    )


@pytest.mark.parametrize(
    ("us", "left_us"),
    [
        # As predicted: 300 - 150, nothing of 100, and 40 around.
        (440, 190),
        # Programs take 1.5 times as long: 450 - 150, nothing of 150, and 40.
        (640, 340),
        # Twice as long: 600 - 150, 200 - 150, and 40.
        (840, 540),
        # Half as long: all of them are hidden.
        (240, 40),
        # Less than what runs around them was predicted to take.
        (30, 40),
    ],
)
def test_left_over_by_hand(us: float, left_us: float) -> None:
    assert work(300, 300, 100, around_us=40).exposed_of(us) == pytest.approx(left_us)


def test_without_other_work_or_programs_everything_is_left_over() -> None:
    assert exposed_of(123.4, None) == 123.4
    assert work(100, 0, 0, around_us=40).exposed_of(70) == 40


def test_what_the_work_loses_is_left_over_of_measured_times_too() -> None:
    """60 beyond what the formula says, by contention: at any time that is measured."""
    slowed = replace(work(400, 300, 300), exposed_us=260.0)
    assert slowed.exposed_of(600) == 260
    assert slowed.exposed_of(800) == 260 + 200
    assert slowed.exposed_of(200) == 260 - 200


@pytest.mark.parametrize("overlapped_compute_us", OVERLAPPED_COMPUTE_US)
def test_as_predicted_the_prediction_is_left_over(overlapped_compute_us: float) -> None:
    for price in select_chain(TWO_NODES, H100, overlapped_compute_us=overlapped_compute_us).prices:
        overlapped_compute = overlapped_compute_of(price)
        assert overlapped_compute is not None
        assert overlapped_compute.overlapped_compute_us == pytest.approx(overlapped_compute_us)
        assert overlapped_compute.exposed_of(price.total_us) == pytest.approx(price.exposed_us)
    assert overlapped_compute_of(select_chain(TWO_NODES, H100).price) is None


def tuned(selection: Selection, factors: dict[str, float] | None = None) -> Tuning:
    """After a tuning in which each chain takes so many times what was predicted; else as long."""
    candidates = tuning_candidates(selection)
    tuning = Tuning(candidates=candidates, num_steps=60)
    turns: list[int] = []
    while (turn := tuning.next()) is not None:
        turns.append(turn)
        if len(turns) >= LATE:
            tuning.add(turns[-LATE], times(candidates[turns[-LATE]], factors))
    tuning.add(turns[-1], times(candidates[turns[-1]], factors))
    return tuning


def times(candidate: TuningCandidate, factors: dict[str, float] | None) -> Any:
    """[S, P] of one rank and 4 passes."""
    us = candidate.predicted_us * (factors or {}).get(candidate.chain, 1.0)
    return np.full((1, 4), round(us / 4), dtype=np.int64)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("overlapped_compute_us", [0.0, *OVERLAPPED_COMPUTE_US])
def test_a_tuning_ends_with_the_plan_if_all_is_as_planned(
    workload: Workload, overlapped_compute_us: float
) -> None:
    planned = plan(workload, H100, overlapped_compute_us=overlapped_compute_us)
    tuning = tuned(select_chain(workload, H100, overlapped_compute_us=overlapped_compute_us))
    assert tuning.candidates[tuning.winner].key == (planned.chain, planned.num_chunks)


def test_of_what_is_hidden_alike_the_plainer_wins() -> None:
    """The pick is too slow to be hidden; the others leave 40 or 41 us, within the margin."""
    candidates = tuple(
        TuningCandidate(
            chain=chain,
            num_chunks=chunks,
            predicted_us=440.0,
            overlapped_compute=work(1000, 100, 100, 100, 100, around_us=around_us),
        )
        for chain, chunks, around_us in (
            ("hierarchical_alltoall", 2, 40),
            ("alltoall_dedup", 4, 40),
            ("alltoall_dedup", 2, 41),
        )
    )
    tuning = Tuning(candidates=candidates, num_steps=9)
    tuning.settled_us = (1500, 440, 441)
    assert tuning.candidates[tuning.winner].key == ("alltoall_dedup", 2)
    # Without other work the fastest does.
    tuning.candidates = tuple(replace(each, overlapped_compute=None) for each in candidates)
    assert tuning.candidates[tuning.winner].key == ("alltoall_dedup", 4)


def test_replicas_with_other_predictions_of_it_settle_alone() -> None:
    plain = tuning_candidates(select_chain(TWO_NODES, H100))
    hashes = [
        Tuning(candidates=candidates, num_steps=9).summary()[0]
        for candidates in (
            plain,
            tuning_candidates(select_chain(TWO_NODES, H100, overlapped_compute_us=1000.0)),
            tuning_candidates(select_chain(TWO_NODES, H100, overlapped_compute_us=2000.0)),
        )
    ]
    assert len(set(hashes)) == 3


def test_a_tuning_says_what_is_exposed() -> None:
    """The pick takes twice what was predicted, so another chain leaves less over."""
    selection = select_chain(TWO_NODES, H100, overlapped_compute_us=2000.0)
    pick = selection.price.chain.name
    tuning = tuned(selection, {pick: 2.0})
    winner = tuning.candidates[tuning.winner]
    assert winner.chain != pick
    title, head, *rows = tuning_table(tuning)
    assert title.endswith("forward + backward beside 2,000 us of computation")
    assert "exposed us" in head and [row.endswith("chosen") for row in rows].count(True) == 1
    made = plan_of_tuning(selection, tuning, tokens_per_rank=2048)
    assert (made.chain, made.num_chunks, made.key.overlapped_compute_us) == (*winner.key, 2000.0)
    assert made.reason.startswith("measured over 60 iterations beside 2,000 us of computation: ")
    assert made.reason.count("us of them exposed") == 2 and "x as fast" not in made.reason
    of_pick = next(each for each in made.candidates if each.chain == pick and each.rejected)
    assert of_pick.rejected is not None and "us of them exposed" in of_pick.rejected
    assert isinstance(made, Plan)
    # On other traffic it is chosen by the same rule: of all that is hidden, the plainest.
    hidden = select_chain(TWO_NODES, H100, overlapped_compute_us=1e7)
    chosen = tuned(hidden).select(hidden.allowed, ("no chain", 1))
    assert chosen is hidden.price
