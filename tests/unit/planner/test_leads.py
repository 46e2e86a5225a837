"""The host's part of a price: between its bounds, by peers, and the ends of published figures."""

from dataclasses import replace

import pytest
from clusters import LAUNCH, link, preset, shape_of, with_link

from monta_megatron.chains import CHAINS
from monta_megatron.planner.chain_price import price_chain


@pytest.mark.parametrize("chain", CHAINS)
def test_prices_of_cpu_ranks_are_those_of_passes_one_by_one(chain: str) -> None:
    """Neither a lead nor a speed, peers nor an end is in them."""
    cluster = preset("emulated_2x4_500mbit")
    assert cluster.ends is None and cluster.host is cluster.launch
    assert cluster.with_kernel_choice("auto") is cluster
    priced = price_chain(
        shape_of(8, ranks_per_node=4), cluster, CHAINS[chain], 1, "forward_backward"
    )
    for of_pass in priced.passes:
        alone = of_pass.scheduled(cluster.factor, 0.0)
        surrounded_us = sum(
            work.launch_us * len(work.times_us) + sum(work.times_us)
            for work in (*of_pass.before, *of_pass.after)
        )
        assert of_pass.total_us == pytest.approx(
            of_pass.host_us + surrounded_us + alone.schedule.total_us
        )


@pytest.mark.parametrize("chain", CHAINS)
def test_a_price_lies_between_an_instant_host_and_none_ahead(chain: str) -> None:
    cluster = preset("h100_8x_ndr")
    num_chunks = 1 if CHAINS[chain].serial else 4
    led, instant = (
        price_chain(shape_of(16), each, CHAINS[chain], num_chunks, "forward_backward")
        for each in (cluster, replace(cluster, launch=LAUNCH))
    )
    alone_us = sum(each.scheduled(cluster.factor, 0.0).total_us for each in led.passes)
    assert instant.total_us <= led.total_us <= alone_us


def test_a_collective_costs_the_host_by_its_peers() -> None:
    """20 us and 1.5 for each other rank: 21.5 for a rail of 2, 114.5 for 64 ranks."""
    launch = replace(LAUNCH, collective_us=20.0, collective_peer_us=1.5)
    assert launch.start_us("alltoall", 0, 1) == 21.5
    assert launch.start_us("alltoall", 0, 63) == 114.5
    faster = replace(launch, host_speed=2.0).at_speed
    assert faster.start_us("alltoall", 0, 1) == 10.75
    cluster = replace(preset("h100_8x_ndr"), launch=launch)
    priced = price_chain(shape_of(16), cluster, CHAINS["hierarchical_alltoall"], 1, "forward")
    by_stage = {work.stage: work.launch_us for work in priced.passes[0].works}
    assert by_stage["exchange of counts"] == 20 + 15 * 1.5
    assert by_stage["alltoall between nodes"] == 20 + 1 * 1.5
    assert by_stage["alltoall in node"] == 20 + 7 * 1.5


def test_the_ends_of_published_figures_bound_the_likely_one() -> None:
    cluster = preset("h100_8x_ndr")
    assert cluster.ends is not None
    rates = [
        {link.resource: link.rate.gbytes_per_s for link in each.links}
        for each in (*cluster.ends, cluster)
    ]
    assert rates == [
        {"inter": 49, "intra": 370, "memory": 2959},
        {"inter": 46, "intra": 335, "memory": 2475},
        {"inter": 47, "intra": 335, "memory": 2475},
    ]
    assert [each.launch.host_speed for each in (*cluster.ends, cluster)] == [1.9, 0.5, 1.25]
    assert all(each.ends is None for each in cluster.ends)


def test_the_wrong_end_is_refused() -> None:
    slow = link("inter", 1.0, 40.0)
    with pytest.raises(ValueError, match=r"conservative_rate: .* must be at most rate"):
        with_link(preset("h100_8x_ndr"), "inter", conservative_rate=slow.rate.times(2))
    with pytest.raises(ValueError, match=r"optimistic_rate: .* must be at least rate"):
        with_link(preset("h100_8x_ndr"), "inter", optimistic_rate=slow.rate.times(0.5))
    with pytest.raises(ValueError, match=r"conservative_speed: .* must be at most host_speed"):
        replace(LAUNCH, conservative_speed=2.0)
