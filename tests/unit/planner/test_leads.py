"""The host ahead of its device: passes that begin with a lead, by hand.

A pass here is one operation, or two of two chunks, without anything around them.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from clusters import LAUNCH, link, preset, shape_of, with_link

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import (
    COMBINE,
    COMBINE_BACKWARD,
    DISPATCH,
    DISPATCH_BACKWARD,
    Operation,
    Pass,
    Policy,
    Program,
    RowFormat,
)
from monta_megatron.planner.chain_price import price_chain
from monta_megatron.planner.pricing import NOT_YET, PassPrice, with_leads
from monta_megatron.planner.schedule import Work, simulate

ROW = RowFormat(hidden_size=8, value_bytes=2, prob_bytes=0, sum_bytes=4)


def free(*_: str) -> float:
    return 1.0


def operation(number: int, series: int, after: Sequence[int] = ()) -> Operation:
    return Operation(
        number=number,
        kind="pack",
        stage=f"s{series}",
        position=series,
        chunk=number,
        series=series,
        reads=(),
        writes=(),
        resource="memory",
        group=None,
        stream=0,
        waits=(),
        after=tuple(after),
        launch_after=(),
        host="enqueues",
        parts_per_sum=1,
    )


def price(
    pass_: Pass, device_us: float, launch_us: float, policy: Policy = "fused", host_us: float = 0.0
) -> PassPrice:
    """A pass of one operation."""
    program = Program(
        pass_=pass_,
        row=ROW,
        policy=policy,
        operations=(operation(0, 0),),
        buffers=(),
        output=0,
        waits_at_end=(),
        num_streams=0,
        num_at_start=0,
    )
    work = Work(stage="s0", resource="memory", times_us=(device_us,), launch_us=launch_us)
    return PassPrice(
        program=program,
        host_us=host_us,
        before=(),
        pipeline=(work,),
        after=(),
        schedule=NOT_YET,
        notes=(),
    )


def totals(*passes: PassPrice) -> list[float]:
    return [led.total_us for led in with_leads(passes, free)]


@pytest.mark.parametrize(("lead_us", "total_us"), [(0, 13), (2, 11), (3, 10), (100, 10)])
def test_a_launch_is_exposed_as_far_as_the_lead_is_used_up(lead_us: float, total_us: float) -> None:
    """One operation of 10 us, whose launch takes 3."""
    work = Work(stage="s0", resource="memory", times_us=(10.0,), launch_us=3.0)
    schedule = simulate([operation(0, 0)], [work], free, lead_us=lead_us)
    assert schedule.total_us == total_us
    assert schedule.host_us == 3 - lead_us


def test_later_launches_run_while_the_device_works() -> None:
    """Launches of 4 us each end at 1 and 5; the operations take 10 and 2: 1 + 10 + 2."""
    works = [
        Work(stage=f"s{series}", resource="memory", times_us=(us,), launch_us=4.0)
        for series, us in enumerate((10.0, 2.0))
    ]
    schedule = simulate([operation(0, 0), operation(1, 1, [0])], works, free, lead_us=3.0)
    assert schedule.total_us == 13 and schedule.host_us == 5


def test_a_dispatch_waits_for_its_counts_and_a_combine_does_not() -> None:
    """Dispatch: 7 us of the host, a launch of 3, 10 on the device. It leaves 10, which hides 3."""
    assert totals(price(DISPATCH, 10, 3, host_us=7), price(COMBINE, 5, 3)) == [20, 5]
    # A launch of 14 is 4 us longer than what was left.
    assert totals(price(DISPATCH, 10, 3, host_us=7), price(COMBINE, 5, 14)) == [20, 9]
    # Without a dispatch before it nothing is queued.
    assert totals(price(COMBINE, 5, 3)) == [8]


def test_the_host_is_ahead_of_long_backward_passes() -> None:
    """10 + 2 us on the device and 3 + 3 of the host: 12 us a layer, whichever pass is short."""
    passes = price(COMBINE_BACKWARD, 10, 3), price(DISPATCH_BACKWARD, 2, 3)
    assert totals(*passes) == [10, 2]
    passes = price(COMBINE_BACKWARD, 2, 3, host_us=1), price(DISPATCH_BACKWARD, 10, 3)
    assert totals(*passes) == [2, 10]


@pytest.mark.parametrize("launches_us", [(8, 8), (16, 1), (1, 16)])
def test_backward_passes_of_a_slow_host_take_its_time(launches_us: tuple[float, float]) -> None:
    """10 + 2 us on the device; the host is never ahead for long, and its time is the layer's."""
    first_us, second_us = launches_us
    passes = price(COMBINE_BACKWARD, 10, first_us), price(DISPATCH_BACKWARD, 2, second_us)
    assert sum(totals(*passes)) == first_us + second_us


def test_cpu_ranks_are_ahead_of_nothing() -> None:
    """The host runs the copies itself."""
    passes = [
        replace(each, program=replace(each.program, policy="host"))
        for each in (price(COMBINE, 5, 3, host_us=1), price(COMBINE_BACKWARD, 10, 3, host_us=1))
    ]
    assert totals(*passes) == [9, 14]


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
