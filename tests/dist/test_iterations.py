"""What runs is decided once per training iteration, by all ranks alike; losses do not notice."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Pools
from iterations import (
    Training,
    checked_in_each_use,
    compare_changing_tokens,
    die_in_gathering,
    end_more_often,
    numbers_of_iterations,
    numbers_of_timed_passes,
    replay_between_decisions,
    resume_while_tuning,
    train,
    train_recorded,
    tuned,
    watched,
)
from layers import Case, disagree
from pool import Pool, PoolError
from test_auto import AUTO

from monta_megatron.planner.plan import Plan

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
def test_tokens_without_experts_are_tuned_watched_and_recorded(
    pools: Pools, tmp_path: Path, routing: str
) -> None:
    """On one rank or on all, in the first micro-batch and in later ones."""
    case = Case(tp=2, topk=2, routing=routing.replace("no_tokens", "uniform"))
    if routing == "no_tokens":
        case = replace(case, num_tokens=0)
    training = Training(num_iterations=STEPS + 8, num_micro_batches=2)
    watched = {"moe_monta_watch_steps": 2, "moe_monta_watch_out": str(tmp_path / "watched")}
    named = {"moe_monta_chain": "hierarchical_alltoall", "moe_monta_ranks_per_node": 2}
    recorded = {"moe_monta_record": str(tmp_path / "recorded"), "moe_monta_record_iteration": 2}
    ours, theirs = (
        pools[4].run(train_recorded, replace(case, options=options), training)
        for options in (TUNED | watched, named | recorded)
    )
    assert str(ours) == str(theirs)
    assert len(list((tmp_path / "recorded").iterdir())) == 4
    lines = (tmp_path / "watched" / "exchange_rank_0.jsonl").read_text().splitlines()
    factors = [json.loads(line)["avg_overload_factor"] for line in lines]
    assert factors and all(
        (factor > 0) == (routing in ("none", "rank1_unrouted")) for factor in factors
    )


def test_candidates_are_checked_before_the_tuning(pools: Pools) -> None:
    """In the first pass of a training, or of the process in which it goes on."""
    num_iterations, resumed_after = 9, 5
    training = Training(num_iterations=num_iterations, num_micro_batches=2)
    found = pools[4].run(checked_in_each_use, CASE, training, resumed_after)
    assert all(each == found[0] for each in found)
    numbers, complete = found[0]
    assert complete == [True, True]
    # Two layers, and two micro-batches.
    first, second = numbers[: 4 * resumed_after], numbers[4 * resumed_after :]
    assert len(first) + len(second) == 4 * num_iterations
    assert first[0] > 3 and second[0] > 3
    assert set(first[1:]) | set(second[1:]) == {0}


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


def test_replicas_of_an_exchange_settle_on_one_chain(pools: Pools, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    # Two exchanges of two ranks, each a node.
    options: dict[str, Any] = TUNED | {
        "moe_monta_ranks_per_node": 1,
        "moe_monta_plan_out": str(path),
    }
    case = Case(ep=2, topk=3, options=options)
    found = pools[4].run(tuned, case, Training(num_iterations=STEPS + 4))
    assert all(each["settled_us"] == found[0]["settled_us"] for each in found)
    assert all(len(each["steps"]) == STEPS for each in found)
    # The first and the third rank are an exchange, or the first two: none by itself.
    winner = found[0]["winner"]
    assert [each["winner"] for each in found] == [winner] * 4
    assert found[0]["ran"][-1] == [winner]
    plan = Plan.load(path)
    assert (plan.chain, plan.num_chunks) == winner
    assert "measured over 12 iterations" in plan.reason
    said = "\n".join(found[0]["said"])
    assert said.count("tuned over 12 iterations") == 1
    assert said.count("predicted us") == 1
    assert re.search(rf"the plan of this tuning: {path}", said)
    assert all(each["said"] == [] for each in found[1:])


@pytest.mark.parametrize("ep", [4, 2])
def test_a_training_goes_on_in_the_middle_of_tuning(pools: Pools, tmp_path: Path, ep: int) -> None:
    """One exchange, and two replicas."""
    case, training = replace(CASE, tp=1, ep=ep), Training(num_iterations=STEPS + 6)
    found = pools[4].run(resume_while_tuning, case, training, str(tmp_path), 6, {})
    fixed = {"moe_monta_chain": "alltoall_allgather", "moe_monta_ranks_per_node": 2}
    stock = pools[4].run(train, replace(case, options=fixed), "monta", training)
    assert [each["losses"] for each in found] == [losses for losses, _ in stock]
    # Of the iterations from the second to the sixth the last was not known yet.
    assert all(each["steps"] == (4, STEPS) for each in found)
    assert all(each["settled_us"] == found[0]["settled_us"] is not None for each in found)
    assert found[0]["said"] == ["monta: auto goes on with what it has decided after 6 iterations"]
    files = sorted(tmp_path.glob("monta/iter_0000006/*"))
    assert [path.name for path in files] == [f"rank_{first}.json" for first in range(0, 4, ep)]


def test_what_was_decided_for_something_else_is_left(pools: Pools, tmp_path: Path) -> None:
    training = Training(num_iterations=6)
    case = replace(CASE, options=TUNED | {"moe_monta_tune_steps": 3})

    def said_after(name: str, change: dict[str, Any]) -> str:
        found = pools[4].run(resume_while_tuning, case, training, str(tmp_path / name), 3, change)
        (line,) = found[0]["said"]
        return str(line)

    line = said_after("limit", {"moe_monta_memory_limit_gb": 1.0})
    assert "auto starts anew: " in line and str(tmp_path / "limit/monta/iter_0000003") in line
    assert "memory_limit_bytes: decided for None, used with 1000000000.0" in line
    # Another exchange's file cannot be read: none goes on by itself.
    case = replace(case, tp=1, ep=2)
    (tmp_path / "folder/monta/iter_0000003/rank_2.json").mkdir(parents=True)
    assert "rank_2.json: cannot be read: Is a directory" in said_after("folder", {})


@pytest.mark.parametrize("option", ["moe_monta_tune_steps", "moe_monta_watch_steps"])
def test_replicas_with_another_number_of_steps_are_named(pools: Pools, option: str) -> None:
    steps = [{option: number} for number in (12, 12, 5, 5)]
    with pytest.raises(PoolError, match=f"ranks 0 and 2 differ in {option}: 12 and 5"):
        pools[4].run(disagree, Case(ep=2, options=AUTO), dict(enumerate(steps)))


def test_ranks_that_count_otherwise_are_named(pools: Pools) -> None:
    with pytest.raises(PoolError, match=r"ranks 0 and 2 differ in iteration: 1 and 2"):
        pools[4].run(end_more_often, CASE, 2)


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


@pytest.mark.parametrize("chain", ["auto", "hierarchical_alltoall"])
def test_one_iteration_in_n_is_watched(pools: Pools, chain: str) -> None:
    """Also where a chain is named; every rank knows the same of it, an iteration later."""
    options = AUTO | {
        "moe_monta_chain": chain,
        "moe_monta_tune_steps": 0,
        "moe_monta_watch_steps": 2,
    }
    training = Training(num_iterations=4, num_micro_batches=2)
    found = pools[4].run(watched, Case(ep=4, topk=3, options=options), training)
    assert all(each == found[0] for each in found)
    assert [each.get("iteration") for each in found[0]] == [None, None, 1, 2]
    latest = found[0][-1]
    assert all(ms > 0 for ms in latest["exchange_ms"].values())
    assert latest["inter_gb"] > 0 and latest["predicted_ms"] > 0
    assert latest["max_overload_factor"] >= latest["avg_overload_factor"] >= 1
    # Its network stage, and its stage in a node if it has one.
    links = {"inter"} if latest["chain"] == "alltoall" else {"inter", "intra"}
    assert set(latest["link_over_predicted"]) == links
