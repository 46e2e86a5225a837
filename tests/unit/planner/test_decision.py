"""What runs in each iteration of a training, played through without one."""

import json
from dataclasses import replace

import numpy as np
import pytest
from clusters import layout_of, preset, shape_of

from monta_megatron.planner.chain_policy import PlannedPolicy, chains_for
from monta_megatron.planner.online.decision import Decision
from monta_megatron.planner.select import NUM_CHUNKS

TOKENS = 512


@pytest.fixture
def policy() -> PlannedPolicy:
    shape = shape_of(8, 1, num_experts=64, tokens=1, topk=8)
    shape = replace(shape, layout=layout_of(8, 1, 4, 64))
    return PlannedPolicy(
        chains=chains_for(shape.layout),
        num_chunks=NUM_CHUNKS,
        cluster=preset("emulated_2x4_500mbit"),
        shape=shape,
    )


class Training:
    """Iterations in which a chain's passes take what it is worth."""

    def __init__(self, policy: PlannedPolicy, num_tuning_steps: int = 0) -> None:
        self.decision = Decision(policy, num_tuning_steps)
        self.ran: list[tuple[str, int]] = []
        self._last: np.ndarray | None = None

    def run(self, num_iterations: int, us: dict[tuple[str, int], int] | None = None) -> None:
        for _ in range(num_iterations):
            if self.decision.has_to_settle:
                assert self.decision.tuning is not None
                self.decision.settle([self.decision.tuning.summary()])
            choice = self.decision.choose(TOKENS)
            key = choice.chain.name, choice.num_chunks
            self.ran.append(key)
            timed = self.decision.is_timed
            # Two ranks and 4 passes; the second rank arrives first and waits.
            least = (us or {}).get(key, 1000)
            pass_us = np.array([[least] * 4, [least + 50] * 4]) if timed else np.empty((2, 0))
            self.decision.end_iteration(self._last, TOKENS, 8)
            self._last = pass_us.astype(np.int64)


def test_without_a_tuning_the_plan_stays(policy: PlannedPolicy) -> None:
    training = Training(policy)
    training.run(5)
    assert training.decision.choose(TOKENS) is policy.choose(TOKENS)
    assert training.decision.tuning is None and training.decision.is_settled


def test_candidates_take_turns_from_the_second_on(policy: PlannedPolicy) -> None:
    planned = policy.choose(TOKENS)
    pick = planned.chain.name, planned.num_chunks
    training = Training(policy, num_tuning_steps=20)
    training.run(1)
    assert training.decision.tuning is not None
    # The best of each chain comes first.
    candidates = [candidate.key for candidate in training.decision.tuning.candidates]
    fast = next(key for key in candidates if key[0] not in (pick[0], "alltoall"))
    us = {key: 500 if key == fast else 1000 for key in candidates}
    training.run(23, us)
    assert training.ran[0] == training.ran[1] == pick
    assert set(training.ran[1:21]) <= set(candidates) and ("alltoall", 1) in training.ran
    assert len(set(training.ran)) >= 5
    # Decided by what was known then, and in the end.
    assert training.ran[21:] == [fast] * 3
    choice = training.decision.choose(TOKENS)
    assert "measured over 20 iterations" in choice.reason and choice.benefit is None
    assert (choice.chain.name, choice.num_chunks) == fast
    # Of other numbers of tokens is said by what was measured of these.
    assert "by prediction times what was measured" in training.decision.choose(64).reason


def test_candidates_are_known_before_the_tuning(policy: PlannedPolicy) -> None:
    training = Training(policy, num_tuning_steps=3)
    ahead = training.decision.candidates(TOKENS)
    assert len(ahead) > 3 and training.decision.candidates(TOKENS) is ahead
    # Other numbers of tokens may have others, and do not replace them.
    assert training.decision.candidates(8) != ahead
    training.run(1)
    assert training.decision.tuning is not None
    assert training.decision.tuning.candidates is ahead
    assert training.decision.candidates(8) is ahead
    training.run(6)
    assert training.decision.tuning.settled_us is not None
    assert training.decision.candidates(TOKENS) == ()
    assert Decision(policy).candidates(TOKENS) == ()


def test_ranks_that_know_the_same_decide_the_same(policy: PlannedPolicy) -> None:
    trainings = [Training(replace(policy), num_tuning_steps=8) for _ in range(2)]
    for training in trainings:
        training.run(20)
    assert trainings[0].ran == trainings[1].ran
    assert trainings[0].decision.agreed_config() == trainings[1].decision.agreed_config()
    assert json.dumps(trainings[0].decision.agreed_config())
