"""Curves: through their points, straight in logarithms between them, a line beyond them."""

import math

import pytest
from clusters import LAUNCH, link

from monta_megatron.calibration.fitting import fit
from monta_megatron.planner.cluster import Cluster, Contention
from monta_megatron.planner.cluster_file import scaled, with_inter_rate
from monta_megatron.planner.curves import Curve


def curve(**changes: object) -> Curve:
    values: dict[str, object] = {
        "operation": "alltoall",
        "resource": "inter",
        "group_size": 2,
        "sizes_bytes": (1_000, 10_000, 100_000),
        "times_us": (20.0, 40.0, 220.0),
        "kind": "measured",
        "source": "by hand",
    }
    return Curve(**{**values, **changes})  # type: ignore[arg-type]


def cluster(*curves: Curve) -> Cluster:
    return Cluster(
        name="test",
        num_nodes=2,
        ranks_per_node=4,
        nics_per_node=4,
        kind="measured",
        source="by hand",
        launch=LAUNCH,
        links=(link("inter", 10.0, 1.0), link("intra", 1.0, 10.0), link("memory", 1.0, 100.0)),
        curves=curves,
    )


def test_through_the_points() -> None:
    for size, time in zip((1_000, 10_000, 100_000), (20.0, 40.0, 220.0), strict=True):
        assert curve().time_us(size) == pytest.approx(time)


def test_straight_in_logarithms() -> None:
    # Half way between 1,000 and 10,000 in logarithms, between 20 and 40 likewise.
    assert curve().time_us(1_000 * math.sqrt(10)) == pytest.approx(20 * math.sqrt(2))


def test_a_line_beyond_the_ends() -> None:
    # Exactly 10 us + bytes / 500: the line goes on.
    sizes = (1_000, 2_000, 4_000, 8_000, 16_000)
    straight = curve(sizes_bytes=sizes, times_us=tuple(10 + size / 500 for size in sizes))
    assert straight.time_us(0) == pytest.approx(10)
    assert straight.time_us(500) == pytest.approx(11)
    assert straight.time_us(160_000) == pytest.approx(330)


def test_no_time_is_negative_and_none_shrinks_with_the_size() -> None:
    steep = curve(sizes_bytes=(1_000, 2_000, 3_000), times_us=(1.0, 20.0, 40.0))
    assert steep.time_us(0) == 0.0
    falling = curve(sizes_bytes=(1_000, 2_000, 3_000), times_us=(9.0, 8.0, 7.0))
    assert falling.time_us(1e9) == 7.0 and falling.time_us(0) == 9.0


def test_fit() -> None:
    sizes = (1_000, 10_000, 100_000)
    # 0.002 us per byte are 0.5 GB/s.
    found = fit(sizes, tuple(5 + size * 0.002 for size in sizes))
    assert found is not None
    assert (found.alpha_us, found.rate.gbytes_per_s) == pytest.approx((5, 0.5))
    assert found.largest_residual == pytest.approx(0, abs=1e-9)
    assert fit(sizes, (3.0, 2.0, 1.0)) is None
    assert fit((100, 1_000, 10_000, 100_000), (0.1, 0.1, 0.1, 0.1)) is None


def test_a_fit_gives_every_point_the_same_weight() -> None:
    # 10 us + 0.001 us per byte, but the two largest sizes take 20% more and 10% less.
    found = fit((1_000, 2_000, 1_000_000, 2_000_000), (11.0, 12.0, 1_212.0, 1_809.0))
    assert found is not None
    assert found.alpha_us == pytest.approx(10, rel=0.05)
    assert found.largest_residual < 0.25


def test_extrapolation_and_the_nearest_group_are_said() -> None:
    both = cluster(curve(), curve(group_size=16, times_us=(30.0, 60.0, 330.0)))
    assert both.time_us("alltoall", "inter", 5_000, 2).note is None
    beyond = both.time_us("alltoall", "inter", 1e6, 2)
    assert beyond.note is not None and "extrapolated beyond 1,000 to 100,000 bytes" in beyond.note
    nearest = both.time_us("alltoall", "inter", 10_000, 8)
    assert nearest.us == pytest.approx(60.0)
    assert nearest.note is not None and "no curve for 8 ranks, that for 16 taken" in nearest.note


def test_the_larger_of_two_equally_near_groups_is_taken() -> None:
    both = cluster(curve(), curve(group_size=8, times_us=(30.0, 60.0, 330.0)))
    found = both.time_us("alltoall", "inter", 1_000, 4)
    assert found.us == pytest.approx(30)
    assert found.note is not None and "no curve for 4 ranks, that for 8 taken" in found.note


def test_what_stands_in_for_an_operation_without_a_curve() -> None:
    copies = cluster(
        curve(operation="copy", resource="memory", group_size=1),
        curve(operation="sum", resource="memory", group_size=1, times_us=(50.0, 60.0, 70.0)),
    )
    assert copies.time_us("permute", "memory", 10_000).us == pytest.approx(40)
    assert copies.time_us("unpermute", "memory", 10_000).us == pytest.approx(60)
    # No curve at all: the line, 1 us + 10,000 bytes at 10 GB/s.
    assert copies.time_us("alltoall", "intra", 10_000, 4).us == pytest.approx(2)


def test_ranks_share_the_network_interfaces_of_their_node() -> None:
    shared = cluster()
    halved = Cluster(**{**vars_of(shared), "nics_per_node": 2})  # type: ignore[arg-type]
    # 10 us + 10,000 bytes at 1 GB/s, or at half of it.
    assert shared.time_us("alltoall", "inter", 10_000, 8).us == pytest.approx(20)
    assert halved.time_us("alltoall", "inter", 10_000, 8).us == pytest.approx(30)
    # A ring's AllGather crosses once per node: each of its 4 ranks' interfaces carries a quarter.
    assert shared.time_us("allgather", "inter", 10_000, 8, 4).us == pytest.approx(12.5)


def test_another_network_rate_scales_the_bytes_and_not_the_start() -> None:
    sizes = (1_000, 10_000, 100_000)
    line = curve(sizes_bytes=sizes, times_us=tuple(10 + size / 1_000 for size in sizes))
    half = with_inter_rate(cluster(line), 0.5)
    for size in (0, 1_000, 10_000, 1_000_000):
        before, after = cluster(line), half
        grown = after.time_us("alltoall", "inter", size, 2).us - 10
        assert grown == pytest.approx(
            2 * (before.time_us("alltoall", "inter", size, 2).us - 10), rel=1e-6
        )
    assert half.time_us("alltoall", "intra", 10_000, 4) == cluster().time_us(
        "alltoall", "intra", 10_000, 4
    )
    with pytest.raises(ValueError, match="rate_ratio: got 0"):
        with_inter_rate(cluster(), 0)


def test_a_start_that_the_transfer_hides_is_not_added_to_it() -> None:
    # 30 us to start, or 1 us per 1,000 bytes, whichever is longer.
    sizes = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
    hidden = curve(sizes_bytes=sizes, times_us=tuple(max(30, size / 1_000) for size in sizes))
    # 30 - 1 + 2; 30 - 10 + 20; from 100,000 bytes on nothing but bytes.
    assert scaled(hidden, 0.5).times_us == pytest.approx((31, 40, 200, 2_000, 20_000), rel=1e-6)
    faster = scaled(hidden, 2).times_us
    # Half of the bytes' time is gone, but starting takes what it takes: 30 us, less the bytes of
    # the first points at their own slope.
    assert faster[2:] == pytest.approx((50, 500, 5_000), rel=1e-6)
    assert all(29 < time <= 30 for time in faster[:2])


def test_contention_of_a_pair_in_any_order() -> None:
    entry = Contention(pair=("memory", "intra"), factor=1.5, kind="measured", source="by hand")
    found = Cluster(**{**vars_of(cluster()), "contention": (entry,)})  # type: ignore[arg-type]
    assert found.factor("intra", "memory") == found.factor("memory", "intra") == 1.5
    assert found.factor("inter", "memory") == 1.0
    assert found.factor("inter", "inter") == 2.0


def test_contention_of_a_pair_that_feels_it_unequally() -> None:
    entry = Contention(
        pair=("inter", "memory"),
        factor=1.1,
        factor_of_second=1.6,
        kind="measured",
        source="by hand",
    )
    found = Cluster(**{**vars_of(cluster()), "contention": (entry,)})  # type: ignore[arg-type]
    assert (found.factor("inter", "memory"), found.factor("memory", "inter")) == (1.1, 1.6)


def vars_of(instance: Cluster) -> dict[str, object]:
    return {name: getattr(instance, name) for name in instance.__dataclass_fields__}
