"""What runs is decided once per training iteration, by all ranks alike; losses do not notice."""

from dataclasses import replace

import pytest
from iterations import (
    Training,
    checked_in_each_use,
    compare_changing_tokens,
    die_in_gathering,
    end_more_often,
    numbers_of_iterations,
    numbers_of_timed_passes,
    replay_between_decisions,
    train,
    tuned,
)
from layers import Case, error_of, refusal_of
from pool import Pool, Pools
from test_auto import AUTO

STEPS = 12
TUNED = AUTO | {"moe_monta_tune_steps": STEPS}
# With two terms in a sum every chain gives the same bits.
CASE = Case(tp=2, topk=2, options=TUNED)


@pytest.mark.parametrize(
    "training",
    [
        Training(num_iterations=STEPS + 5),
        Training(num_iterations=STEPS + 5, recompute="selective", num_micro_batches=2),
        Training(num_iterations=STEPS + 5, recompute="full", evaluates=3),
        Training(num_iterations=STEPS + 5, num_micro_batches=2, evaluates=2, skips=5),
    ],
    ids=["plain", "selective", "full", "accumulation"],
)
def test_losses_while_tuning_are_those_of_a_fixed_chain(pools: Pools, training: Training) -> None:
    fixed = {"moe_monta_chain": "alltoall_allgather", "moe_monta_ranks_per_node": 2}
    ours = pools[4].run(train, CASE, "monta", training)
    stock = pools[4].run(train, replace(CASE, options=fixed), "monta", training)
    assert [losses for losses, _ in ours] == [losses for losses, _ in stock]
    ran = ours[0][1]
    assert all(by_rank == ran for _, by_rank in ours)
    # One choice in an iteration, its evaluation apart, which has more tokens.
    assert all(len(each) == 1 for each in ran) or training.evaluates
    assert len({key for each in ran for key in each}) >= 3
    assert ("alltoall", 1) in {key for each in ran for key in each}


@pytest.mark.parametrize("routing", ["none", "rank1_unrouted", "unrouted", "no_tokens"])
def test_tokens_without_experts_are_tuned(pools: Pools, routing: str) -> None:
    """On one rank or on all, in the first micro-batch and in later ones."""
    case = Case(tp=2, topk=2, routing=routing.replace("no_tokens", "uniform"))
    if routing == "no_tokens":
        case = replace(case, num_tokens=0)
    training = Training(num_iterations=STEPS + 2, num_micro_batches=2)
    named = {"moe_monta_chain": "hierarchical_alltoall", "moe_monta_ranks_per_node": 2}
    (ours, theirs) = (
        [
            losses
            for losses, _ in pools[4].run(train, replace(case, options=options), "monta", training)
        ]
        for options in (TUNED, named)
    )
    # As text: without tokens they are NaN.
    assert str(ours) == str(theirs)


def test_candidates_are_checked_before_the_tuning(pools: Pools) -> None:
    """In the first pass, of two layers and two micro-batches."""
    training = Training(num_iterations=5, num_micro_batches=2)
    found = pools[4].run(checked_in_each_use, CASE, training)
    assert all(each == found[0] for each in found)
    (first, *later), is_complete = found[0]
    assert is_complete and first > 3 and later == [0] * (4 * 5 - 1)


def test_sums_in_another_order_stay_within_their_bound(pools: Pools) -> None:
    """Three terms: a last bit may differ, and no token chooses another expert here."""
    training = Training(num_iterations=STEPS + 3)
    case = Case(ep=4, topk=3, options=TUNED)
    fixed = {"moe_monta_chain": "alltoall", "moe_monta_ranks_per_node": 2}
    (ours, ran), (stock, _) = (
        pools[4].run(train, replace(case, options=options), "monta", training)[0]
        for options in (TUNED, fixed)
    )
    assert len({key for each in ran for key in each}) >= 3
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


def test_only_steps_after_a_gradient_are_counted(pools: Pools) -> None:
    """Not those of the second optimizer, not evaluations; a skipped step adds its iteration."""
    case = replace(CASE, options=AUTO | {"moe_monta_tune_steps": 0})
    training = Training(num_iterations=6, num_micro_batches=2, evaluates=2, skips=3)
    assert pools[4].run(numbers_of_iterations, case, training) == [[1, 2, 2, 3, 4, 4]] * 4


def test_passes_of_an_evaluation_are_not_timed(pools: Pools) -> None:
    """Two layers of 4 passes, or of 6 where all is recomputed, and 4 candidates' turns."""
    case = replace(CASE, options=AUTO | {"moe_monta_tune_steps": 4})
    for recompute, num_passes in (("", 8), ("full", 12)):
        training = Training(num_iterations=7, evaluates=1, recompute=recompute)
        numbers = pools[4].run(numbers_of_timed_passes, case, training)
        assert numbers == [[num_passes] * 4] * 4


def test_replicas_of_an_exchange_settle_on_one_chain(pools: Pools) -> None:
    # Two exchanges of two ranks, each a node.
    case = Case(ep=2, topk=3, options=TUNED | {"moe_monta_ranks_per_node": 1})
    found = pools[4].run(tuned, case, Training(num_iterations=STEPS + 4))
    assert all(each["settled_us"] == found[0]["settled_us"] for each in found)
    assert all(len(each["steps"]) == STEPS for each in found)
    # The first and the third rank are an exchange, or the first two: none by itself.
    winner = found[0]["winner"]
    assert [each["winner"] for each in found] == [winner] * 4
    assert found[0]["ran"][-1] == [winner]
    said = "\n".join(found[0]["said"])
    assert said.count("tuned over 12 iterations") == said.count("predicted us") == 1
    assert all(each["said"] == [] for each in found[1:])


def test_replicas_with_another_number_of_steps_are_named(pools: Pools) -> None:
    steps = [{"moe_monta_tune_steps": number} for number in (12, 12, 5, 5)]
    cases = [Case(ep=2, options=AUTO | each) for each in steps]
    for refusal in pools[4].run(refusal_of, cases, [{}] * 4):
        assert "differ in moe_monta_tune_steps: 12 and 5" in refusal


def test_ranks_that_count_otherwise_are_named(pools: Pools) -> None:
    for error in pools[4].run(error_of, end_more_often, CASE, 2):
        assert "ranks 0 and 2 differ in iteration: 1 and 2" in error


def test_a_rank_that_dies_between_iterations_is_named() -> None:
    pool = Pool(4, group_limit_s=10.0)
    try:
        answers = pool.run_on_survivors(die_in_gathering, 3)
    finally:
        pool.close()
    assert sorted(answers) == [0, 1, 2]
    for rank, (message, seconds) in answers.items():
        assert seconds < 15.0
        assert message.startswith(
            f"between iterations: exchange of traffic, group tp_ep (rank {rank} of 4: ranks "
            "0, 1, 2, 3) failed: "
        )
        assert "\nno pass is under way; monta-megatron " in message


def test_a_fixed_number_of_tokens_decides_before_the_counts(pools: Pools) -> None:
    """Until another number of tokens comes, and rows enter again if they have to be others."""
    # The check of a chain's first use enters as well.
    case = Case(tp=2, topk=2, options=AUTO | {"moe_monta_tune_steps": 0, "moe_monta_check": 0})
    for seen in pools[4].run(compare_changing_tokens, case, [1, 1, 4096, 4096, 1, 1]):
        chains, points, again = zip(*seen, strict=True)
        # The first iteration shows it.
        late, early = "before_permutation_1", "before_ep_alltoall"
        assert points == (late, early, early, early, early, early)
        assert chains[0] == chains[1] == chains[4] != chains[2] == chains[3]
        assert again == (False, False, True, False, True, False)


def test_decisions_advance_where_preprocess_is_replayed(pools: Pools) -> None:
    case = Case(tp=2, ep=2, etp=2, topk=2, options=TUNED)
    for seen in pools[4].run(replay_between_decisions, case, STEPS + 4):
        assert [number for number, _, _ in seen] == list(range(1, STEPS + 5))
        assert {chain for _, chain, _ in seen} == {"alltoall", "alltoall_allgather"}
