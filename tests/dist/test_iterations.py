"""What runs is chosen once per step, by all ranks of an exchange alike; losses do not notice."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dispatchers import replay_cuda_graph_attributes, run_phases
from iterations import Exchange, Model, Training
from layers import (
    Case,
    build_layer,
    build_pair,
    error_of,
    gathered,
    make_batch,
    printed,
    same_on_all_ranks,
)
from pool import on_ranks
from test_auto import AUTO, PICKED

STEPS = 9
TUNED = AUTO.options | {"tune_steps": STEPS}
# With two terms in a sum every chain gives the same bits.
CASE = replace(AUTO, tp=2, options=TUNED)
# Two exchanges of two ranks, each rank a node.
REPLICAS = replace(AUTO, ep=2, options=TUNED, ranks_per_node=1)
TRAININGS = {
    "plain": (CASE, Training()),
    "selective": (CASE, Training(recompute="selective", micro_batches=(2, 2))),
    "full": (CASE, Training(recompute="full", evaluates=3)),
    "not_reentrant": (CASE, Training(recompute="not reentrant", tokens=(8, 3, 16, 5))),
    "accumulation": (CASE, Training(micro_batches=(3, 3), evaluates=2)),
    "changing_tokens": (CASE, Training(tokens=(40, 7, 0, 90, 2), evaluates=4)),
    "two_shapes": (CASE, Training(num_steps=30, shapes=2, recompute="full")),
    # Tokens with fewer experts than top-k, some of whose forward passes wait for the counts.
    "fewer": (replace(CASE, routing="capacity"), Training(recompute="not reentrant")),
    # In the first micro-batch and in later ones.
    "none_on_a_rank": (replace(CASE, routing="empty_rank", seed=1), Training()),
    "none": (replace(CASE, routing="no_expert"), Training()),
    "no_tokens": (CASE, Training(tokens=(0,))),
    "replica_without_micro_batch": (REPLICAS, Training(absent=((0, 3, 4, 13), (5, 14)))),
    "replica_evaluates_alone": (REPLICAS, Training(evaluates=2, evaluating=(1,))),
    "other_numbers_of_micro_batches": (REPLICAS, Training(micro_batches=(1, 3))),
}


def check_choices(by_rank: list[list[Exchange]], exchange_size: int) -> None:
    """One choice in a step, on all ranks of an exchange, and one candidate on all exchanges."""
    candidates: dict[tuple[int, int], str] = {}
    for rank, exchanges in enumerate(by_rank):
        assert exchanges == by_rank[rank - rank % exchange_size]
        of_step: dict[tuple[int, int], str] = {}
        for shape, step, choice, is_training in exchanges:
            assert of_step.setdefault((shape, step), choice) == choice or not is_training
            if is_training and shape == 0 and step < STEPS:
                assert candidates.setdefault((shape, step), choice) == choice, "not in phase"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TRAININGS)
@on_ranks(4)
def test_losses_while_tuning_are_those_of_a_fixed_chain(name: str) -> None:
    case, training = TRAININGS[name]
    with printed() as text:
        model = Model(case, training)
        losses = model.train()
    check_choices(gathered(model.exchanges), case.size)
    fixed = Model(replace(case, chain="alltoall_allgather", options={}), training)
    # As text: without tokens they are NaN.
    assert str(losses) == str(fixed.train())
    said = text.getvalue()
    assert not said or "alltoall in 1 chunk" in said
    if dist.get_rank() % case.size == 0:
        wins = [line for line in said.splitlines() if " wins with " in line]
        assert len(wins) == training.shapes, said
        assert "pin it with --moe-monta-chain " in wins[0]


def tune(
    case: Case, num_steps: int, us_of_choice: dict[str, float]
) -> tuple[list[str], str, set[int]]:
    """A training in which each choice takes a given time, and nothing else takes any.

    Returns:
        what ran in each step; what a rank said; the first steps of windows.
    """
    from monta_megatron.integration import auto

    windows = set()
    with printed() as said:
        model = Model(case, Training(num_steps=num_steps))

        def take(*_: Any) -> list[float]:
            return [us_of_choice.get(model.exchanges[-1][2], 1000.0)]

        with (
            mock.patch.object(auto.IterationClock, "take", take),
            mock.patch.object(auto, "us_of", sum),
        ):
            for number in range(num_steps):
                model.step(number)
                windows.add(model.chooser.tuner.window.first)
    ran = dict[int, str]()
    for _, step, name, is_training in model.exchanges:
        if is_training:
            assert ran.setdefault(step, name) == name
    return list(ran.values()), said.getvalue(), windows


@on_ranks(4)
def test_the_winner_runs_from_the_third_step_after_the_window() -> None:
    """24 steps; the best so far runs in two, since the times of the last steps are on their way."""
    case = replace(CASE, options=AUTO.options | {"tune_steps": 24})
    names, _, _ = tune(case, 9, {})
    # The slowest before, one candidate is the fastest by far, but all its trials but the last are
    # slow ones: only step 23 tells.
    candidates = names[:8]
    assert candidates[0] == "alltoall in 1 chunk" and names[8] == candidates[0]
    us = {name: 1000.0 + 10 * number for number, name in enumerate(candidates)}
    us[candidates[3]] = 800.0
    ran, said, windows = tune(case, 40, us)
    assert ran[:24] == candidates * 3 and ran[24:] == [candidates[3]] * 16
    assert windows == {0}
    assert not said or said.count("wins with 0.80 ms per iteration") == 1


@on_ranks(4)
def test_a_rank_that_steps_alone_is_named() -> None:
    from monta_megatron.integration import auto

    model = Model(CASE, Training())
    model.step(0)
    if dist.get_rank() == 2:
        model.optimizers[0].step()
    error = error_of(model.step, 1)
    assert "ranks 0 and 2 differ in step: 1 and 2; an optimizer has to make a" in error
    # They stay apart.
    auto._shared.clear()


@on_ranks(4)
def test_replicas_with_another_number_of_steps_are_named() -> None:
    steps = 12 if dist.get_rank() < 2 else 6
    case = replace(AUTO, ep=2, options=AUTO.options | {"tune_steps": steps})
    assert "differ in moe_monta_tune_steps: 12 and 6" in error_of(build_layer, case)


@on_ranks(4)
def test_the_tokens_of_a_step_decide_for_the_next() -> None:
    """So that nothing is waited for before a row is touched, but in the first exchange."""
    case = replace(PICKED, tp=2)
    stock, layer = build_pair(case)
    dispatcher = layer.token_dispatcher
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    chains, waited = [], []
    for num_tokens in [1, 1, 4096, 4096, 1, 1]:
        batch = make_batch(replace(case, tokens=(num_tokens,)), layer)
        with mock.patch.object(dispatcher, "_enter", wraps=dispatcher._enter) as enter:
            ours, theirs = (run_phases(case, one.token_dispatcher, batch) for one in (layer, stock))
        assert torch.equal(ours["output"], theirs["output"])
        optimizer.step()
        chains.append(dispatcher.choice.chain)
        waited.append(enter.call_args.args[0].exchanges != ())
    assert waited == [True] + [False] * 5
    assert chains[0] == chains[1] == chains[2] == chains[5] != chains[3] == chains[4]


@on_ranks(4)
def test_nothing_is_tuned_where_preprocess_is_replayed() -> None:
    seen = replay_cuda_graph_attributes(replace(CASE, ep=2, etp=2), 4)
    assert len(set(seen)) == 1


@on_ranks(4)
def test_a_teacher_follows_the_student() -> None:
    """It only evaluates, and has the student's shape and exchange."""
    training = Training()
    student = Model(CASE, training)
    teacher = Model(CASE, training, is_first=False)
    assert teacher.chooser is student.chooser
    for layer in teacher.layers:
        layer.eval()
    for number in range(training.num_steps):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            teacher.forward(generator, 24)
        student.step(number)
    by_step: dict[int, set[str]] = {}
    for _, step, choice, _ in same_on_all_ranks(teacher.exchanges + student.exchanges):
        by_step.setdefault(step, set()).add(choice)
    # Before the first training exchange the planner picks.
    assert all(len(choices) == 1 for step, choices in by_step.items() if step)
