"""Tuning, against turns worked by hand, and what every rank has to decide alike."""

from collections.abc import Sequence

import hypothesis
import numpy as np
import pytest
from clusters import preset, shape_of
from hypothesis import strategies as st

from monta_megatron.chains.program import NOT_TIMED_US
from monta_megatron.planner.online.tuning import (
    LATE,
    Tuning,
    TuningCandidate,
    trimmed_mean,
    tuning_candidates,
)
from monta_megatron.planner.online.tuning_report import tuning_table
from monta_megatron.planner.select import select_chain

H100 = preset("h100_8x_ndr")


def candidates(**predicted_us: float) -> tuple[TuningCandidate, ...]:
    """alltoall_dedup_4=100.0 -> that chain in 4 chunks."""
    named = ((name.rpartition("_"), us) for name, us in predicted_us.items())
    return tuple(
        TuningCandidate(chain=chain, num_chunks=int(chunks), predicted_us=us)
        for (chain, _, chunks), us in named
    )


THREE = candidates(alltoall_dedup_4=1000.0, alltoall_1=1200.0, alltoall_dedup_1=1100.0)


def passes(us: float) -> np.ndarray:
    """[S, P] of three ranks and two layers whose four passes take `us` on the fastest rank."""
    return np.outer([1.5, 1, 1.25], np.full(8, us / 4)).round().astype(np.int64)


def add(tuning: Tuning, us: float) -> None:
    """The oldest step that is not added yet took so long."""
    tuning.add(tuning._started[len(tuning.steps)][0], passes(us))


def tune(tuning: Tuning, us: Sequence[float]) -> list[int]:
    """Whose turns it was if each candidate always takes as long as `us` says."""
    turns: list[int] = []
    while (candidate := next_turn(tuning, us)) is not None:
        turns.append(candidate)
    return turns


def next_turn(tuning: Tuning, us: Sequence[float]) -> int | None:
    """The next step, once the results of those before it have come as late as may be."""
    while len(tuning.steps) + LATE <= len(tuning._started):
        add(tuning, us[tuning._started[len(tuning.steps)][0]])
    return tuning.next()


def test_turns_by_hand() -> None:
    """Of 9 steps.

    0 0    the pick: the first run of its chain does not count
    1 1    stock's order
    0      what stock's order took in step 3 is not known yet
    2      one chunk: 1,100 * (1,000 / 1,000) are expected, not far behind
    2      the faster of 1 and 2, with one run each that counts
    1      the fewest; 1,200 are near, 1,000 * 1.3
    0      the last result comes too late: what is best runs
    """
    turns = tune(Tuning(candidates=THREE, num_steps=9), [1000, 1200, 1100])
    assert turns == [0, 0, 1, 1, 0, 2, 2, 1, 0]


def test_what_is_far_behind_runs_no_more() -> None:
    turns = tune(Tuning(candidates=THREE, num_steps=20), [1000, 5000, 1400])
    # Chunk 1 got a second run before the result of its first was known.
    assert turns[:7] == [0, 0, 1, 1, 0, 2, 2] and set(turns[7:]) == {0}


def test_a_near_one_runs_until_it_is_known_to_be_behind() -> None:
    """20% behind passes after one run (30%), not after two (15%)."""
    turns = tune(Tuning(candidates=THREE[:2], num_steps=20), [1000, 1200])
    assert turns.count(1) == 3


def test_other_chunks_of_the_faster_chain_are_tried_first() -> None:
    """The pick takes twice what was predicted, the other chain what was predicted."""
    tried = candidates(
        alltoall_dedup_4=1000.0,
        alltoall_1=1500.0,
        hierarchical_alltoall_2=1200.0,
        alltoall_dedup_2=1050.0,
        hierarchical_alltoall_4=1250.0,
    )
    turns = tune(Tuning(candidates=tried, num_steps=14), [2000, 3000, 1200, 2100, 1150])
    # By prediction alone it would be 3, which is then far behind: 1,050 * 2 > 1,200 * 1.3.
    assert list(dict.fromkeys(turns)) == [0, 1, 2, 4]


def test_one_chunk_is_tried_against_several_before_other_numbers() -> None:
    """Measured with costs of a network five times slower, at which pipelines seem to pay.

    By prediction times factor, 9 would come after 6, 7, 5 and 10: 425 * 233 / 396 = 250 are
    expected of it, and nothing new is tried so late.
    """
    tried = candidates(
        hierarchical_allgather_4=384.0,
        alltoall_1=1181.0,
        hierarchical_alltoall_4=396.0,
        alltoall_dedup_1=857.0,
        allgather_1=904.0,
        hierarchical_alltoall_2=417.0,
        alltoall_dedup_2=860.0,
        alltoall_dedup_4=861.0,
        hierarchical_allgather_1=420.0,
        hierarchical_alltoall_1=425.0,
        allgather_4=930.0,
    )
    us = [1e3 * ms for ms in (233, 248, 233, 194, 239, 210, 202, 222, 205, 187, 290)]
    tuning = Tuning(candidates=tried, num_steps=20)
    assert list(dict.fromkeys(tune(tuning, us))) == [0, 1, 2, 3, 4, 6, 8, 9, 10]
    assert tuning.winner == 9


def test_nothing_new_is_tried_near_the_end() -> None:
    """Of 8 steps, 6 for what is new: two chains, and a step to wait for the second one's result."""
    turns = tune(Tuning(candidates=THREE, num_steps=6), [1000, 1200, 1100])
    assert set(turns) == {0, 1}


def test_a_chain_far_behind_in_several_chunks_is_tried_in_one() -> None:
    """On cores that are busy already: 385 in 4 chunks are 57% behind 245, but 230 in one are not.

    By prediction times factor, 385 * 425 / 396 = 413 would be expected.
    """
    tried = candidates(
        hierarchical_alltoall_4=396.0, alltoall_1=1181.0, hierarchical_alltoall_1=425.0
    )
    us = [1e3 * ms for ms in (385, 245, 230)]
    tuning = Tuning(candidates=tried, num_steps=12)
    assert list(dict.fromkeys(tune(tuning, us))) == [0, 1, 2]
    assert tuning.winner == 2
    tuning = Tuning(candidates=tried, num_steps=12)
    assert 2 not in tune(tuning, [395e3, *us[1:]])


@pytest.mark.parametrize(("challenger_us", "winner"), [(972, 0), (968, 1), (2000, 0)])
def test_a_challenger_wins_by_the_margin(challenger_us: float, winner: int) -> None:
    """1,000 <= 972 * 1.03 = 1,001, but 968 * 1.03 = 997."""
    tuning = Tuning(candidates=THREE[:2], num_steps=8)
    tune(tuning, [1000, challenger_us])
    assert tuning.is_over and tuning.next() is None
    assert tuning.winner == winner


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_few_steps_leave_the_pick(num_steps: int) -> None:
    tuning = Tuning(candidates=THREE, num_steps=num_steps)
    assert len(tune(tuning, [1000, 10, 10])) == num_steps
    assert tuning.winner == 0


def test_one_candidate_is_the_winner() -> None:
    tuning = Tuning(candidates=THREE[:1], num_steps=5)
    assert tune(tuning, [1000]) == [0] * 5
    assert tuning.winner == 0


def test_the_first_run_of_a_chain_does_not_count() -> None:
    tuning = Tuning(candidates=THREE, num_steps=12)
    assert [tuning.next(), tuning.next()] == [0, 0]
    add(tuning, 90_000)
    tuning.next()
    assert tuning.measured_us == (None, None, None)
    add(tuning, 1000)
    tuning.next()
    assert tuning.measured_us == (1000, None, None)
    # Other chunks of the same chain count at once.
    tune(tuning, [1000, 1200, 1100])
    assert [step.counts for step in tuning.steps[:7]] == [False, True, False, *[True] * 4]


def test_a_step_is_what_its_passes_took_on_the_fastest_rank() -> None:
    tuning = Tuning(candidates=THREE, num_steps=9)
    tuning.next()
    # Rank 1 waits in the first pass, rank 0 in the second; the third was not timed everywhere.
    times = np.array([[100, 301, 1, 200], [202, 101, NOT_TIMED_US, 299]], dtype=np.int64)
    tuning.add(0, times)
    # (100 + 301 + 200) / 3 * 4 = 801.3 and (202 + 101 + 299) / 3 * 4 = 802.7
    assert (tuning.steps[0].us, tuning.steps[0].slowest_us) == (801, 803)
    tuning.next()
    tuning.add(0, times[:, :0])
    assert tuning.steps[1].us == 0


def test_trimmed_mean() -> None:
    assert trimmed_mean([10]) == 10
    assert trimmed_mean([10, 20]) == 15
    assert trimmed_mean([10, 900, 20]) == 20
    assert trimmed_mean([10, 900, 20, 30]) == 25
    assert trimmed_mean([900, 10, 20, 30, 40, 50, 1]) == 30


TIMES_US = st.lists(st.integers(4, 4000), min_size=20, max_size=20)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(TIMES_US, st.lists(st.integers(1, LATE), min_size=21, max_size=21))
def test_ranks_choose_alike_however_late_results_come(us: list[int], waits: list[int]) -> None:
    """One rank is given each result as late as may be, the other sooner."""
    slow, fast = (Tuning(candidates=THREE, num_steps=20) for _ in range(2))
    for step in range(21):
        for tuning, late in ((slow, LATE), (fast, waits[step])):
            while len(tuning.steps) + late <= step:
                add(tuning, us[len(tuning.steps)])
        candidate = slow.next()
        assert fast.next() == candidate and (candidate is None) == (step == 20)
        assert fast.winner == slow.winner


def test_replicas_settle_by_what_all_have_measured() -> None:
    """1,000 + 1,300 against 1,100 + 1,000: the second wins for both, 2,300 > 2,100 * 1.03."""
    replicas = [Tuning(candidates=THREE[:2], num_steps=8) for _ in range(2)]
    for tuning, us in zip(replicas, ([1000, 1100], [1300, 1000]), strict=True):
        tune(tuning, us)
    assert [tuning.winner for tuning in replicas] == [0, 1]
    summaries = [tuning.summary() for tuning in replicas]
    for tuning in replicas:
        tuning.settle(summaries)
        assert (tuning.winner, tuning.measured_us) == (1, (1150, 1050))


def test_what_one_replica_has_not_measured_cannot_win() -> None:
    replicas = [Tuning(candidates=THREE, num_steps=9) for _ in range(2)]
    tune(replicas[0], [1000, 1200, 500])
    # Here the third candidate is never tried: its chain is far behind.
    tune(replicas[1], [2000, 1000, 2000])
    summaries = [tuning.summary() for tuning in replicas]
    assert summaries[0][0] == summaries[1][0] and summaries[1][3] == 0
    replicas[0].settle(summaries)
    assert (replicas[0].winner, replicas[0].measured_us[2]) == (1, None)


def test_replicas_with_other_candidates_settle_alone() -> None:
    here, there = Tuning(candidates=THREE[:2], num_steps=8), Tuning(candidates=THREE, num_steps=8)
    tune(here, [1000, 1100])
    tune(there, [2000, 10, 10])
    here.settle([here.summary(), there.summary()])
    assert (here.winner, here.measured_us) == (0, (1000, 1100))


def test_factors_of_what_was_not_measured() -> None:
    tuning = Tuning(candidates=THREE, num_steps=9)
    assert tuning.factor(("alltoall", 1)) == 1
    tune(tuning, [1200, 1200, 660])
    assert tuning.factor(("alltoall_dedup", 4)) == 1.2
    assert tuning.factor(("alltoall", 1)) == 1
    # Of its chain: the root of 1.2 * 0.6; of all: the third root of 1.2 * 1 * 0.6.
    assert tuning.factor(("alltoall_dedup", 8)) == pytest.approx(0.72 ** (1 / 2))
    assert tuning.factor(("allgather", 1)) == pytest.approx(0.72 ** (1 / 3))


def test_candidates_of_a_selection() -> None:
    selection = select_chain(shape_of(16), H100)
    found = tuning_candidates(selection)
    assert found[0].key == (selection.price.chain.name, selection.price.num_chunks)
    assert found[0].predicted_us == selection.price.total_us
    # Stock's order is among them, however slow it is predicted to be.
    assert found[1].key == ("alltoall", 1)
    assert found[1].predicted_us > 1.5 * found[0].predicted_us
    assert len({candidate.key for candidate in found}) == len(found)
    rivals = {(price.chain.name, price.num_chunks) for price in selection.rivals}
    assert {candidate.key for candidate in found} <= rivals
    chains = [candidate.chain for candidate in found]
    first = [chains.index(chain) for chain in dict.fromkeys(chains)]
    assert first == list(range(len(first)))
    # Where stock's order is the pick, it comes once.
    inside = tuning_candidates(select_chain(shape_of(8, topk=1), H100.with_kernels(False)))
    assert inside[0].key == ("alltoall", 1) and ("alltoall", 1) not in [
        candidate.key for candidate in inside[1:]
    ]


def test_new_traffic_is_planned_with_the_factors() -> None:
    selection = select_chain(shape_of(16), H100)
    tuning = Tuning(candidates=tuning_candidates(selection), num_steps=20)
    pick = tuning.candidates[0]
    # Everything takes twice what was predicted, but stock's order a tenth.
    factors = [0.1 if each.chain == "alltoall" else 2.0 for each in tuning.candidates]
    tune(
        tuning, [f * each.predicted_us for f, each in zip(factors, tuning.candidates, strict=True)]
    )
    assert tuning.candidates[tuning.winner].chain == "alltoall"
    less = select_chain(shape_of(16, tokens=2048), H100)
    assert less.price.chain.name == pick.chain
    assert tuning.select(less.rivals, ("alltoall", 1)).chain.name == "alltoall"
    # What runs stays within the margin, and may be none of the rivals now.
    assert tuning.select(less.rivals, ("no chain", 1)).chain.name == "alltoall"


def test_the_table_says_what_was_predicted_and_measured() -> None:
    tuning = Tuning(candidates=THREE, num_steps=9)
    tune(tuning, [1000, 1200, 800])
    title, head, *rows = tuning_table(tuning)
    assert title == "tuned over 9 iterations: dispatch + combine, forward + backward"
    assert head.split() == [
        *("chain", "chunks", "predicted", "us", "measured", "us", "runs", "imbalance"),
    ]
    # Every run's slowest rank took 1.5 times as long as the fastest.
    assert rows[0].split() == ["alltoall_dedup", "1", "1,100", "800", "-27%", "3", "50%", "chosen"]
    assert rows[1].split()[:7] == ["alltoall_dedup", "4", "1,000", "1,000", "+0%", "2", "50%"]
    assert rows[1].endswith("the planner's pick")
    stays = Tuning(candidates=THREE, num_steps=9)
    tune(stays, [1000, 1200, 1100])
    assert tuning_table(stays)[2].endswith("chosen, the planner's pick")
    assert len(rows) == 3 and all(line == line.rstrip() for line in rows)
