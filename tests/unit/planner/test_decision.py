"""What runs in each iteration of a training, played through without one."""

import json
from dataclasses import replace

import numpy as np
import pytest
from clusters import layout_of, preset, workload_of
from monta_megatron.planner.routing.observed import ObservedRouting, Traffic, expected_traffic

from monta_megatron.chains.layout import Layout
from monta_megatron.common import strict_yaml
from monta_megatron.planner.chain_policy import PlannedPolicy, chains_for
from monta_megatron.planner.online.decision import LOOK_EVERY, Decision, DecisionState, Outcome
from monta_megatron.planner.routing.drawn import expected_routing
from monta_megatron.planner.routing.expected import ExpectedRouting, UniformRouting
from monta_megatron.planner.select import NUM_CHUNKS

UNIFORM = UniformRouting(num_experts=64, topk=8)
ONE_RANK = UniformRouting(num_experts=64, topk=8, num_groups=8, group_topk=1)
LIMITED = expected_routing("node-limited", 64, 8, 2)
ALL = Traffic(pairs=np.ones(8), rank_hits=np.ones(8), node_hits=np.ones(2))
TOKENS = 512


@pytest.fixture
def policy() -> PlannedPolicy:
    workload = workload_of(8, 1, num_experts=64, tokens=1, topk=8, routing=UNIFORM)
    workload = replace(workload, layout=layout_of(8, 1, 4, 64))
    return PlannedPolicy(
        chains=chains_for(workload.layout),
        num_chunks=NUM_CHUNKS,
        cluster=preset("emulated_2x4_500mbit"),
        workload=workload,
    )


class Training:
    """Iterations whose tokens follow a routing; a chain's passes take what it is worth."""

    def __init__(self, policy: PlannedPolicy, num_tuning_steps: int = 0) -> None:
        self.decision = Decision(policy, num_tuning_steps)
        self.layout: Layout = policy.workload.layout
        self.ran: list[tuple[str, int]] = []
        self._last: Outcome | None = None

    def run(
        self, num_iterations: int, routing: object, us: dict[tuple[str, int], int] | None = None
    ) -> None:
        assert isinstance(routing, ExpectedRouting)
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
            outcome = Outcome(expected_traffic(routing, self.layout, ALL), pass_us.astype(np.int64))
            self.decision.end_iteration(self._last, TOKENS, 8)
            self._last = outcome


def test_as_long_as_traffic_is_as_expected_the_plan_stays(policy: PlannedPolicy) -> None:
    training = Training(policy)
    expected = policy.choose(TOKENS)
    for _ in range(50):
        training.run(1, UNIFORM)
        assert training.decision.choose(TOKENS) is expected
    assert training.decision.routing is UNIFORM and training.decision.tuning is None


def test_a_routing_that_changes_is_followed(policy: PlannedPolicy) -> None:
    training = Training(policy)
    training.run(30, UNIFORM)
    training.run(60, LIMITED)
    found = training.decision.routing
    assert isinstance(found, ObservedRouting)
    assert found.hits(2) == pytest.approx([0.5, 0.5], rel=0.03)
    assert "observed routing" in training.decision.choose(TOKENS).reason
    training.run(60, UNIFORM)
    assert training.decision.routing is UNIFORM
    assert training.decision.choose(TOKENS) is policy.choose(TOKENS)


@pytest.mark.parametrize("num_tuning_steps", [0, 20])
def test_a_change_decides_within_100_iterations(
    policy: PlannedPolicy, num_tuning_steps: int
) -> None:
    """Whenever it comes: from any experts to those of one rank, drawn for each token.

    Then as much crosses the network in copies for ranks as in copies for nodes: 565 ms are
    predicted against 582, and chains with copies for nodes are measured to be 5% slower.
    """
    us = {
        (price.chain.name, price.num_chunks): round(
            price.total_us * (1.05 if price.chain.name.startswith("hierarchical") else 1.0) / 4
        )
        for price in policy.selection(TOKENS, 8, UNIFORM).prices
    }
    for num_before in range(40, 40 + LOOK_EVERY, 10):
        training = Training(policy, num_tuning_steps)
        training.run(num_before, UNIFORM, us)
        assert training.decision.choose(TOKENS).chain.name == "hierarchical_allgather"
        training.run(100, ONE_RANK, us)
        after = training.decision.choose(TOKENS)
        assert (after.chain.name, after.num_chunks) == ("alltoall_dedup", 4)


def test_another_routing_from_the_start_is_seen_in_the_third(policy: PlannedPolicy) -> None:
    training = Training(policy)
    training.run(2, LIMITED)
    assert isinstance(training.decision.routing, ObservedRouting)


def test_candidates_take_turns_from_the_second_on(policy: PlannedPolicy) -> None:
    planned = policy.choose(TOKENS)
    pick = planned.chain.name, planned.num_chunks
    training = Training(policy, num_tuning_steps=20)
    training.run(1, UNIFORM)
    assert training.decision.tuning is not None
    # The best of each chain comes first.
    candidates = [candidate.key for candidate in training.decision.tuning.candidates]
    fast = next(key for key in candidates if key[0] not in (pick[0], "alltoall"))
    us = {key: 500 if key == fast else 1000 for key in candidates}
    training.run(23, UNIFORM, us)
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
    # The winner stays where its prediction on other traffic, times its factor, is the best.
    training.run(60, LIMITED, us)
    assert isinstance(training.decision.routing, ObservedRouting)
    assert training.decision.choose(TOKENS).chain.name == fast[0]


def test_candidates_are_known_before_the_tuning(policy: PlannedPolicy) -> None:
    training = Training(policy, num_tuning_steps=3)
    ahead = training.decision.candidates(TOKENS)
    assert len(ahead) > 3 and training.decision.candidates(TOKENS) is ahead
    # Other numbers of tokens may have others, and do not replace them.
    assert training.decision.candidates(8) != ahead
    training.run(1, UNIFORM)
    assert training.decision.tuning is not None
    assert training.decision.tuning.candidates is ahead
    assert training.decision.candidates(8) is ahead
    resumed = Decision(policy, num_tuning_steps=3)
    resumed.resume(training.decision.state())
    assert resumed.candidates(TOKENS) == ahead
    training.run(6, UNIFORM)
    assert training.decision.tuning.settled_us is not None
    assert training.decision.candidates(TOKENS) == ()
    assert Decision(policy).candidates(TOKENS) == ()


def test_candidates_hold_no_more_than_the_limit(policy: PlannedPolicy) -> None:
    """They are candidates for a number of tokens; for more of them the plan is."""
    most = max(price.peak_bytes for price in policy.selection(TOKENS).prices)
    limited = replace(policy, memory_limit_bytes=most)
    training = Training(limited, num_tuning_steps=12)
    for _ in range(14):
        training.run(1, UNIFORM)
        assert training.decision.choose(64 * TOKENS) is limited.choose(64 * TOKENS)
    assert len(set(training.ran)) > 2


def test_measured_over_predicted_is_of_the_traffic_meanwhile(policy: PlannedPolicy) -> None:
    training = Training(policy, num_tuning_steps=12)
    training.run(20, LIMITED)
    tuning = training.decision.tuning
    assert tuning is not None
    prices = {
        (price.chain.name, price.num_chunks): price.total_us
        for price in policy.selection(TOKENS, 0, training.decision.routing).prices
    }
    assert isinstance(training.decision.routing, ObservedRouting)
    for candidate in tuning.candidates:
        assert candidate.predicted_us == prices[candidate.key]


@pytest.mark.parametrize("num_before", [0, 1, 2, 9, 13, 14, 30])
def test_a_resumed_training_goes_on(policy: PlannedPolicy, num_before: int) -> None:
    """Through a file; of the outcomes that were not known yet the steps run again."""
    training = Training(policy, num_tuning_steps=12)
    training.run(num_before, LIMITED)
    text = json.dumps(strict_yaml.plain(training.decision.state()))
    state = strict_yaml.build(DecisionState, json.loads(text), "state")
    resumed = Training(policy, num_tuning_steps=12)
    resumed.decision.resume(state)
    assert resumed.decision.number == num_before
    if training.decision.tuning is not None and num_before >= 14:
        assert resumed.decision.choose(TOKENS).chain is training.decision.choose(TOKENS).chain
    resumed.run(20, LIMITED)
    tuning = resumed.decision.tuning
    assert tuning is not None
    assert len(tuning.steps) == 12 and tuning.settled_us is not None
    assert isinstance(resumed.decision.routing, ObservedRouting)


def test_a_state_of_another_tuning_is_refused(policy: PlannedPolicy) -> None:
    training = Training(policy, num_tuning_steps=12)
    training.run(5, UNIFORM)
    with pytest.raises(ValueError, match="num_steps: got 12, must be 20"):
        Decision(policy, 20).resume(training.decision.state())


def test_ranks_that_know_the_same_decide_the_same(policy: PlannedPolicy) -> None:
    trainings = [Training(replace(policy), num_tuning_steps=8) for _ in range(2)]
    for training in trainings:
        training.run(40, expected_routing("skewed", 64, 8, 2))
    assert trainings[0].ran == trainings[1].ran
    assert trainings[0].decision.agreed_config() == trainings[1].decision.agreed_config()
    assert json.dumps(trainings[0].decision.agreed_config())
