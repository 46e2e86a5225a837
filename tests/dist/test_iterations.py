"""What runs is chosen once per step, by all ranks of an exchange alike; losses do not notice."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from cuda_graphs import replay_cuda_graph_attributes
from iterations import Exchange, Model, Training
from layers import (
    build_layer,
    build_pair,
    compare,
    entering,
    error_of,
    forward_backward,
    gathered,
    idle_optimizer,
    printed,
    same_on_all_ranks,
)
from pool import on_ranks
from test_auto import AUTO, PICKED

from monta_megatron.integration.results import FOLDER_VARIABLE, read_results
from monta_megatron.planner import tuning
from monta_megatron.planner.tuning import TIME_LAG

# Steps of a window, and of a training.
STEPS, NUM_STEPS = 9, 13
TUNED = AUTO.options | {"tune_steps": STEPS}
# With two terms in a sum every chain gives the same bits.
CASE = replace(AUTO, tp=2, options=TUNED)
# Two exchanges of two ranks, each rank a node.
REPLICAS = replace(AUTO, ep=2, options=TUNED, ranks_per_node=1)
LAYERS = yaml.safe_load(Path(__file__).with_name("tuned_layers.yaml").read_text())


@pytest.mark.parametrize("changes", LAYERS, ids=str)
@on_ranks(4)
def test_a_layer_while_tuning_is_stocks(changes: dict[str, Any]) -> None:
    with printed() as said:
        choices = compare(replace(CASE, num_steps=NUM_STEPS, **changes))
    assert choices[0].name == "alltoall in 1 chunk" and choices[:STEPS] == choices[:3] * 3
    # The best so far runs until the last times are known.
    (winner,) = set(choices[STEPS + TIME_LAG :])
    if dist.get_rank() == 0:
        (line,) = [line for line in said.getvalue().splitlines() if " wins with " in line]
        assert winner.name in line and "pin it with --moe-monta-chain " in line


TRAININGS = {
    "accumulation": (CASE, Training(micro_batches=(3, 3), evaluates=2)),
    "replica_without_micro_batch": (REPLICAS, Training(absent=((0, 3, 4, 13), (5, 14)))),
    "replica_evaluates_alone": (REPLICAS, Training(evaluates=2, evaluating=(1,))),
    "other_numbers_of_micro_batches": (REPLICAS, Training(micro_batches=(1, 3))),
}


def check_choices(by_rank: list[list[Exchange]], exchange_size: int) -> None:
    """One choice in a step, on all ranks of an exchange, and one candidate on all exchanges."""
    candidates: dict[int, str] = {}
    for rank, exchanges in enumerate(by_rank):
        assert exchanges == by_rank[rank - rank % exchange_size]
        of_step: dict[int, str] = {}
        for step, choice, is_training in exchanges:
            assert of_step.setdefault(step, choice) == choice or not is_training
            if is_training and step < STEPS:
                assert candidates.setdefault(step, choice) == choice, "not in phase"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TRAININGS)
@on_ranks(4)
def test_losses_while_tuning_are_those_of_a_fixed_chain(name: str) -> None:
    case, training = TRAININGS[name]
    model = Model(case, training)
    losses = model.train(NUM_STEPS)
    check_choices(gathered(model.exchanges), case.size)
    fixed = Model(replace(case, chain="alltoall_allgather", options={}), training)
    assert losses == fixed.train(NUM_STEPS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("recompute", ["", "reentrant", "not reentrant"])
@on_ranks(4)
def test_log_probabilities_and_pauses_are_not_timed(recompute: str) -> None:
    """Passes in training mode without a backward pass, before every step, and a pause."""
    from monta_megatron.exchange import monitor

    compared = []
    for log_probs in (0, 1):
        model = Model(CASE, Training(log_probs=log_probs, recompute=recompute))
        with mock.patch.object(monitor, "time", model.clock):
            model.train(NUM_STEPS)
        compared.append(same_on_all_ranks(model.chooser.tuner.window.comparison))
    without, beside = compared
    assert beside.num_measured == without.num_measured and beside.kind == without.kind
    assert beside.us.keys() == without.us.keys()
    assert all(beside.us[choice] <= 2 * without.us[choice] for choice in without.us)


@pytest.mark.timeout(60)
@on_ranks(4)
def test_steps_that_are_drawn_anew_are_compared_per_token() -> None:
    """The first candidate takes the least time for a token, in the clock that is put in.

    A round more is needed: after three, the last two candidates are known by one time each.
    """
    from monta_megatron.exchange import monitor

    model = Model(CASE, Training(is_drawn=True))
    with printed() as said, mock.patch.object(monitor, "time", model.clock):
        model.train(STEPS + 3 + TIME_LAG + 1)
    window = same_on_all_ranks(model.chooser.tuner.window)
    assert window.end == STEPS + 3 and window.comparison.kind is None
    assert set(window.comparison.num_measured.values()) == {3}
    assert window.best == next(iter(window.candidates))
    if dist.get_rank() == 0:
        assert "for steps of unequal work, compared per token; " in said.getvalue()


@on_ranks(4)
def test_a_rank_that_evaluates_runs_what_the_others_run() -> None:
    """In one of two layers, while they train; the step is not timed, the next one is."""
    model = Model(CASE, Training())
    model.step(0)
    model.layers[1].train(dist.get_rank() != 1)
    model.step(1)
    model.layers[1].train()
    model.step(2)
    steps = [(step, choice) for step, choice, _ in model.exchanges]
    assert len(set(same_on_all_ranks(steps))) == 3
    assert set(model.chooser.tuner.window.trials) == {0, 2}


@on_ranks(2)
def test_a_rank_that_evaluates_from_the_start_is_followed() -> None:
    """No window opens, and the planner picks for all ranks alike."""
    case = replace(AUTO, ep=2, ranks_per_node=1, options=TUNED)
    layer = build_layer(case)
    for step in range(3):
        forward_backward(replace(case, evaluating=1), layer, step)
    same_on_all_ranks(layer.token_dispatcher.choice)
    assert layer.token_dispatcher.chooser.tuner.window is None


@on_ranks(4)
def test_the_winner_runs_from_the_third_step_after_the_window() -> None:
    """24 steps; the best so far runs in two, since the times of the last steps are on their way.

    Each choice takes a given time, and nothing else takes any.
    """
    from monta_megatron.integration import auto

    model = Model(replace(CASE, options=AUTO.options | {"tune_steps": 24}), Training())
    us, choice_of = dict[str, float](), dict[int, str]()
    take = auto.IterationClock.take

    def take_named(clock: auto.IterationClock) -> list[auto.Segment]:
        segments = take(clock)
        for segment in segments:
            choice_of[id(segment)] = model.exchanges[-1][1]
        return segments

    def us_of(segments: list[auto.Segment]) -> float:
        return sum(us.get(choice_of[id(segment)], 1000.0) for segment in segments)

    with (
        printed() as said,
        mock.patch.object(auto.IterationClock, "take", take_named),
        mock.patch.object(auto, "us_of", us_of),
    ):
        model.step(0)
        names = [choice.name for choice in model.chooser.tuner.window.candidates]
        us |= {name: 1000.0 + 10 * number for number, name in enumerate(names)}
        us |= {names[3]: 800.0, names[6]: 500.0}
        if dist.get_rank() == 0:
            # The slowest rank decides, and nothing where a rank has no time.
            us |= {names[5]: 100.0, names[6]: 0.0}
        for number in range(1, 40):
            model.step(number)
    ran = [{name for step, name, _ in model.exchanges if step == number} for number in range(40)]
    assert ran == [{name} for name in names * 3 + names[3:4] * 16]
    assert dist.get_rank() or said.getvalue().count("wins with 0.80 ms per iteration") == 1


@on_ranks(4)
def test_every_group_writes_the_results_of_its_two_windows(tmp_path: Path) -> None:
    """Its first rank does, into the folder that the launch names, what its lines say."""
    second_after = 12
    with (
        printed() as said,
        mock.patch.dict(os.environ, {FOLDER_VARIABLE: str(tmp_path)}),
        mock.patch.object(tuning, "STEPS_TO_SECOND", second_after),
    ):
        Model(REPLICAS, Training()).train(second_after + STEPS + TIME_LAG + 1)
    ranks = dist.get_process_group_ranks(dist.group.WORLD)
    own = ranks[:2] if dist.get_rank() < 2 else ranks[2:]
    dist.barrier()
    results = [result for result in read_results(tmp_path) if result.ranks == tuple(own)]
    assert [(result.window, result.step) for result in results] == [(1, 0), (2, second_after)]
    if dist.get_rank() == own[0]:
        lines = [line for line in said.getvalue().splitlines() if " wins with " in line]
        for line, result in zip(lines, results, strict=True):
            assert f"trials in steps {result.step} to " in line
            assert f"pin it with {result.flags}; " in line


@on_ranks(4)
def test_a_result_that_cannot_be_written_stops_no_training(tmp_path: Path) -> None:
    folder = tmp_path / "file" / "folder"
    folder.parent.write_text("no folder")
    with printed() as said, mock.patch.dict(os.environ, {FOLDER_VARIABLE: str(folder)}):
        Model(CASE, Training()).train(STEPS + TIME_LAG + 1)
    told = f"a requeued job will pin no flags, {FOLDER_VARIABLE}: "
    assert said.getvalue().count(told) == (dist.get_rank() == 0)


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
    dispatcher, optimizer = layer.token_dispatcher, idle_optimizer()
    chains, waited = [], []
    for num_tokens in [1, 1, 4096, 4096, 1, 1]:
        step = replace(case, tokens=(num_tokens,))
        with entering(dispatcher) as waits:
            ours, theirs = (forward_backward(step, one).values for one in (layer, stock))
        assert torch.equal(ours["output"], theirs["output"])
        optimizer.step()
        chains.append(dispatcher.choice.chain)
        waited += waits
    assert waited == [True] + [False] * 5
    assert chains[0] == chains[1] == chains[2] == chains[5] != chains[3] == chains[4]


@on_ranks(4)
def test_nothing_is_tuned_where_preprocess_is_replayed() -> None:
    """A chain of permuted tokens, which the graph has permuted."""
    (name,) = set(replay_cuda_graph_attributes(replace(CASE, ep=2, etp=2)))
    assert name.split()[0] in ("alltoall", "alltoall_allgather")


@on_ranks(4)
def test_a_teacher_follows_the_student() -> None:
    """It only evaluates, and has the student's shape and exchange."""
    student, teacher = (Model(CASE, Training(), is_first) for is_first in (True, False))
    assert teacher.chooser is student.chooser
    for number in range(NUM_STEPS):
        teacher.evaluate(torch.Generator().manual_seed(number))
        student.step(number)
    by_step: dict[int, set[str]] = {}
    for step, choice, _ in same_on_all_ranks(teacher.exchanges + student.exchanges):
        by_step.setdefault(step, set()).add(choice)
    # Before the first training exchange the planner picks.
    assert all(len(choices) == 1 for step, choices in by_step.items() if step)
