"""A routing as a training has shown it: what is kept of it, and that plans do not suffer."""

from dataclasses import replace

import numpy as np
import pytest
from clusters import layout_of, preset, workload_of
from monta_megatron.planner.routing.observed import (
    ObservedRouting,
    Traffic,
    expected_traffic,
    observed_routing,
)

from monta_megatron.chains.layout import Layout
from monta_megatron.planner.chain_policy import PlannedPolicy, chains_for
from monta_megatron.planner.layout import priced_ranks
from monta_megatron.planner.plan import plan
from monta_megatron.planner.routing.drawn import expected_routing
from monta_megatron.planner.routing.expected import ExpectedRouting, UniformRouting
from monta_megatron.planner.select import NUM_CHUNKS

LAYOUT = layout_of(8, 1, 4, 64)
UNIFORM = UniformRouting(num_experts=64, topk=8)


def traffic(
    pairs: list[float], rank_hits: list[float] | None = None, node_hits: list[float] | None = None
) -> Traffic:
    return Traffic(
        pairs=np.array(pairs),
        rank_hits=np.array(rank_hits or []),
        node_hits=np.array(node_hits or []),
    )


ALL = traffic([1.0] * 8, [0.5] * 8, [0.9] * 2)


def seen(routing: ExpectedRouting, layout: Layout = LAYOUT) -> ObservedRouting:
    return observed_routing(expected_traffic(routing, layout, ALL), layout, 8)


def test_the_busiest_stand_first_and_the_others_share_the_rest() -> None:
    """8 ranks on 2 nodes; rank 6 has most, then rank 1, and rank 0 nothing."""
    found = observed_routing(
        traffic([0, 2, 1, 1, 0.5, 0.5, 4, 0.5], [0.5] * 8, [0.6, 0.9]), LAYOUT, 8
    )
    by_rank = found.expert_shares.reshape(8, 8).sum(axis=1)
    expected = [4, *[0.5] * 3, 2, *[2 / 3] * 3]
    assert by_rank == pytest.approx(expected, rel=0.011)
    assert found.hits(2) == pytest.approx([0.9, 0.6], rel=0.011)
    assert found.hits(8) == pytest.approx([0.5] * 8, rel=0.011)
    # The busiest rank of node 0, its others, and the same of node 1.
    assert list(found.kinds(LAYOUT)) == [0, 2, 2, 2, 1, 3, 3, 3]
    ranks = priced_ranks(LAYOUT, found, 1)
    assert [layout.rank for layout in ranks.layouts] == [0, 1, 4, 5]
    assert ranks.num_represented == (1, 3, 1, 3)


def test_no_plan_is_made_for_noise_or_for_other_places() -> None:
    generator = np.random.default_rng(0)
    quiet = seen(UNIFORM)
    for _ in range(20):
        noise = 1 + generator.uniform(-0.01, 0.01, size=8)
        noisy = observed_routing(
            replace(expected_traffic(UNIFORM, LAYOUT, ALL), pairs=noise), LAYOUT, 8
        )
        assert not noisy.differs(quiet)
    one, other = (
        observed_routing(traffic(list(np.roll([3.0, *[1.0] * 7], place))), LAYOUT, 8)
        for place in (1, 6)
    )
    assert one == other and hash(one) == hash(other)
    assert one.differs(observed_routing(traffic([1.0] * 8), LAYOUT, 8))


def test_a_moving_average_forgets() -> None:
    average = traffic([1.0, 0.0])
    for number in range(1, 5):
        average = average.averaged(traffic([0.0, 1.0]), number)
    assert list(average.pairs) == pytest.approx([0.2, 0.8])
    for number in range(5, 60):
        average = average.averaged(traffic([1.0, 0.0]), number)
    assert list(average.pairs) == pytest.approx([1.0, 0.0], abs=0.01)


@pytest.mark.parametrize(
    "layout",
    [
        # Every rank is a node; one node; ETP 2; and ranks that lie on nodes in turn.
        layout_of(4, 1, 1, 64),
        layout_of(4, 1, 4, 64),
        layout_of(4, 2, 4, 64),
        replace(layout_of(4, 1, 2, 64), nodes=(0, 1, 0, 1)),
    ],
)
def test_any_layout_has_an_observed_routing(layout: Layout) -> None:
    found = seen(UNIFORM, layout)
    assert found.expert_shares.sum() == pytest.approx(8, rel=0.02)
    assert found.hits(layout.ep) == pytest.approx(UNIFORM.hits(layout.ep), rel=0.02)
    workload = workload_of(
        layout.ep, layout.etp, num_experts=64, tokens=1000, topk=8, routing=found
    )
    workload = replace(workload, layout=layout)
    uniform = replace(workload, routing=UNIFORM)
    cluster = preset("emulated_2x4_500mbit")
    for mine, theirs in zip(
        *(plan(each, replace(cluster, num_nodes=8)).candidates for each in (workload, uniform)),
        strict=True,
    ):
        if mine.num_chunks == 1 and mine.chain == theirs.chain:
            assert mine.predicted_us == pytest.approx(theirs.predicted_us, rel=0.05)


@pytest.mark.parametrize("name", ["skewed", "node-limited"])
def test_prices_are_those_of_all_ranks(name: str) -> None:
    """Of the four kinds of ranks, and of the routing rank by rank."""
    routing = expected_routing(name, 64, 8, 2)
    assert isinstance(routing, ExpectedRouting)
    cluster = preset("emulated_2x4_500mbit")
    workload = workload_of(8, 1, num_experts=64, tokens=512, topk=8, routing=routing)
    exact, found = (
        {
            (each.chain, each.num_chunks): each.predicted_us
            for each in plan(work, cluster).candidates
        }
        for work in (workload, replace(workload, routing=seen(routing)))
    )
    assert exact.keys() == found.keys()
    for key, predicted_us in exact.items():
        if predicted_us is not None:
            assert found[key] == pytest.approx(predicted_us, rel=0.03), key


def test_a_table_for_each_routing() -> None:
    cluster = preset("emulated_2x4_500mbit")
    workload = workload_of(8, 1, num_experts=64, tokens=1, topk=8, routing=UNIFORM)
    policy = PlannedPolicy(
        chains=chains_for(LAYOUT), num_chunks=NUM_CHUNKS, cluster=cluster, workload=workload
    )
    limited = seen(expected_routing("node-limited", 64, 8, 2))
    table = policy.table(limited)
    assert policy.table(replace(limited)) is table
    choice = table.choose(512)
    assert table.choose(400) is choice and table.choose(512, 8) is choice
    assert "observed routing" in choice.reason
    assert "observed" not in policy.choose(512).reason
