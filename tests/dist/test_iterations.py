"""What runs is chosen once per step, by all ranks of an exchange alike; losses do not notice."""

from dataclasses import replace

import pytest
from iterations import (
    Trained,
    Training,
    compare_changing_tokens,
    replay_between_steps,
    step_alone,
    train,
    tune,
    two_models,
)
from layers import Case, error_of, refusal_of
from pool import Pools
from test_auto import AUTO

STEPS = 9
TUNED = AUTO | {"moe_monta_tune_steps": STEPS}
# With two terms in a sum every chain gives the same bits.
CASE = Case(tp=2, topk=2, options=TUNED)
# Two exchanges of two ranks, each rank a node.
REPLICAS = Case(ep=2, topk=2, options=TUNED | {"moe_monta_ranks_per_node": 1})
LONG = STEPS + 4
TRAININGS = {
    "plain": Training(num_steps=LONG),
    "selective": Training(num_steps=LONG, recompute="selective", micro_batches=(2, 2)),
    "full": Training(num_steps=LONG, recompute="full", evaluates=3),
    "not_reentrant": Training(num_steps=LONG, recompute="not reentrant", tokens=(8, 3, 16, 5)),
    "accumulation": Training(num_steps=LONG, micro_batches=(3, 3), evaluates=2),
    "changing_tokens": Training(num_steps=LONG, tokens=(40, 7, 0, 90, 2), evaluates=4),
    "two_shapes": Training(num_steps=2 * LONG + 4, shapes=2, recompute="full"),
    # Tokens with fewer experts than top-k, some of whose forward passes wait for the counts.
    "not_reentrant_with_fewer": Training(num_steps=LONG, recompute="not reentrant"),
    "replica_without_micro_batch": Training(num_steps=LONG, absent=((0, 3, 4, 13), (5, 14))),
    "replica_evaluates_alone": Training(num_steps=LONG, evaluates=2, evaluating=(1,)),
    "other_numbers_of_micro_batches": Training(num_steps=LONG, micro_batches=(1, 3)),
}


def check_choices(found: list[Trained], exchange_size: int) -> None:
    """One choice in a step, on all ranks of an exchange, and one candidate on all exchanges."""
    candidates: dict[tuple[int, int], str] = {}
    for rank, one in enumerate(found):
        assert one.exchanges == found[rank - rank % exchange_size].exchanges
        of_step: dict[tuple[int, int], str] = {}
        for shape, step, choice, is_training in one.exchanges:
            assert of_step.setdefault((shape, step), choice) == choice or not is_training
            if is_training and shape == 0 and step < STEPS:
                assert candidates.setdefault((shape, step), choice) == choice, "not in phase"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TRAININGS)
def test_losses_while_tuning_are_those_of_a_fixed_chain(pools: Pools, name: str) -> None:
    training = TRAININGS[name]
    case, size = (REPLICAS, 2) if "replica" in name or "other" in name else (CASE, 4)
    if "fewer" in name:
        case = replace(case, routing="fewer")
    ours = pools[4].run(train, case, "monta", training)
    check_choices(ours, size)
    fixed = {"moe_monta_chain": "alltoall_allgather"}
    fixed["moe_monta_ranks_per_node"] = case.options["moe_monta_ranks_per_node"]
    theirs = pools[4].run(train, replace(case, options=fixed), "monta", training)
    for mine, other in zip(ours, theirs, strict=True):
        # As text: without tokens they are NaN.
        assert str(mine.losses) == str(other.losses)
        assert not mine.said or "alltoall in 1 chunk" in "".join(mine.said)
    for size_of_exchange in range(0, 4, size):
        wins = [line for line in ours[size_of_exchange].said if " wins with " in line]
        assert len(wins) == training.shapes, ours[size_of_exchange].said
        assert "pin it with --moe-monta-chain " in wins[0]


@pytest.mark.parametrize("routing", ["none", "rank1_unrouted", "unrouted", "no_tokens"])
def test_tokens_without_experts_while_tuning(pools: Pools, routing: str) -> None:
    """On one rank or on all, in the first micro-batch and in later ones."""
    case = Case(tp=2, topk=2, routing=routing.replace("no_tokens", "uniform"))
    if routing == "no_tokens":
        case = replace(case, num_tokens=0)
    training = Training(num_steps=STEPS + 2, micro_batches=(2, 2))
    named = {"moe_monta_chain": "hierarchical_alltoall", "moe_monta_ranks_per_node": 2}
    ours, theirs = (
        [
            each.losses
            for each in pools[4].run(train, replace(case, options=options), "monta", training)
        ]
        for options in (TUNED, named)
    )
    # As text: without tokens they are NaN.
    assert str(ours) == str(theirs)


def test_the_winner_runs_from_the_third_step_after_the_window(pools: Pools) -> None:
    """24 steps; the best so far runs in two, since the times of the last steps are on their way."""
    case = replace(CASE, options=AUTO | {"moe_monta_tune_steps": 24})
    names = pools[4].run(tune, case, Training(num_steps=9), {})[0][0]
    # The slowest before, one candidate is the fastest by far, but all its trials but the last are
    # slow ones: only step 23 tells.
    candidates = names[:8]
    assert candidates[0] == "alltoall in 1 chunk" and names[8] == candidates[0]
    us = {name: 1000.0 + 10 * number for number, name in enumerate(candidates)}
    us[candidates[3]] = 800.0
    for ran, said, windows in pools[4].run(tune, case, Training(num_steps=40), us):
        assert ran[:24] == candidates * 3 and ran[24:] == [candidates[3]] * 16
        assert windows == [0]
        assert not said or sum("wins with 0.80 ms per iteration" in line for line in said) == 1


def test_a_rank_that_steps_alone_is_named(pools: Pools) -> None:
    for error in pools[4].run(error_of, step_alone, CASE, 2):
        assert "ranks 0 and 2 differ in step: 1 and 2; an optimizer has to make a" in error


def test_replicas_with_another_number_of_steps_are_named(pools: Pools) -> None:
    steps = [{"moe_monta_tune_steps": number} for number in (12, 12, 6, 6)]
    cases = [Case(ep=2, options=AUTO | each) for each in steps]
    for refusal in pools[4].run(refusal_of, cases, [{}] * 4):
        assert "differ in moe_monta_tune_steps: 12 and 6" in refusal


def test_the_tokens_of_a_step_decide_for_the_next(pools: Pools) -> None:
    """So that nothing is waited for before a row is touched, but in the first exchange."""
    case = Case(tp=2, topk=2, options=AUTO | {"moe_monta_tune_steps": 0})
    late, early = "before_permutation_1", "before_ep_alltoall"
    for seen in pools[4].run(compare_changing_tokens, case, [1, 1, 4096, 4096, 1, 1]):
        chains, points = zip(*seen, strict=True)
        assert points == (late, *(early,) * 5)
        assert chains[0] == chains[1] == chains[2] == chains[5] != chains[3] == chains[4]


def test_nothing_is_tuned_where_preprocess_is_replayed(pools: Pools) -> None:
    case = Case(tp=2, ep=2, etp=2, topk=2, options=TUNED)
    for seen in pools[4].run(replay_between_steps, case, 4):
        assert len(set(seen)) == 1


def test_a_teacher_follows_the_student(pools: Pools) -> None:
    for seen in pools[4].run(two_models, CASE, LONG):
        by_step: dict[int, set[str]] = {}
        for _, step, choice, _ in seen:
            by_step.setdefault(step, set()).add(choice)
        # Before the first training exchange the planner picks.
        assert all(len(choices) == 1 for step, choices in by_step.items() if step)
