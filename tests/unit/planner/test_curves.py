"""Curves: through their points, a line beyond them; NCCL's published ones; costs of a cluster."""

import csv
from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from clusters import CONFIGS, by_hand, cluster_of, link, preset
from hypothesis import given, settings
from hypothesis import strategies as st

from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.curves import OPERATIONS, PUBLISHED, Curve, published_curves
from monta_megatron.tools.plan.request import PlanRequest, plan_request


def curve(points: dict[int, float], group_size: int = 2) -> Curve:
    """Of an AllToAll between nodes: bytes -> us."""
    return Curve(
        operation="alltoall",
        resource="inter",
        group_size=group_size,
        sizes_bytes=tuple(points),
        times_us=tuple(points.values()),
    )


CURVE = curve({1_000: 20.0, 10_000: 40.0, 100_000: 220.0})
SLOWER = {1_000: 30.0, 10_000: 60.0, 100_000: 330.0}


def cluster(*curves: Curve, **fields: Any) -> Cluster:
    """1, 10 and 100 GB/s."""
    links = link(1.0, 10.0), link(10.0, 1.0), link(100.0, 1.0)
    return cluster_of(*links, **{"ranks": 4, "nics": 4, "curves": curves, **fields})


def test_straight_from_point_to_point_and_beyond_the_ends() -> None:
    for num_bytes, us in ((1_000, 20), (10_000, 40), (100_000, 220), (5_500, 30)):
        assert CURVE.time_us(num_bytes) == pytest.approx(us)
    # Exactly 10 us + bytes / 500: the line goes on.
    straight = curve({size: 10 + size / 500 for size in (1_000, 2_000, 4_000, 8_000, 16_000)})
    for num_bytes, us in ((0, 10), (500, 11), (160_000, 330)):
        assert straight.time_us(num_bytes) == pytest.approx(us)
    assert curve({1_000: 1.0, 2_000: 20.0, 3_000: 40.0}).time_us(0) == 0.0
    falling = curve({1_000: 9.0, 2_000: 8.0, 3_000: 7.0})
    assert falling.time_us(1e9) == 7.0 and falling.time_us(0) == 9.0


def test_the_nearest_group_is_taken() -> None:
    groups = cluster(CURVE, curve(SLOWER, 16))
    assert groups.time_us("alltoall", "inter", 10_000, 2) == pytest.approx(40)
    assert groups.time_us("alltoall", "inter", 10_000, 8) == pytest.approx(60)
    # Of two that are as near, the larger.
    groups = cluster(CURVE, curve(SLOWER, 8))
    assert groups.time_us("alltoall", "inter", 1_000, 4) == pytest.approx(30)


def test_what_stands_in_for_an_operation_without_a_curve() -> None:
    gathers = cluster(CURVE, replace(CURVE, operation="copy", resource="memory", group_size=1))
    assert gathers.time_us("sum", "memory", 10_000) == pytest.approx(40)
    assert gathers.time_us("allgather", "inter", 10_000, 2) == pytest.approx(40)
    # 4 ranks to 4 on the other node, 10,000 bytes each. A ring passes the shares of 7 ranks through
    # the interfaces of a node, which its 4 ranks have in equal parts: 17,500 bytes of a rank.
    assert gathers.time_us("allgather", "inter", 40_000, 8, 4) == pytest.approx(55)
    # No curve at all: the line, 1 us + 10,000 bytes at 10 GB/s.
    assert gathers.time_us("alltoall", "intra", 10_000, 4) == pytest.approx(2)


def test_ranks_share_the_network_interfaces_of_their_node() -> None:
    """10 us + 10,000 bytes at 1 GB/s, or at half of it."""
    assert cluster().time_us("alltoall", "inter", 10_000, 8) == pytest.approx(20)
    assert cluster(nics=2).time_us("alltoall", "inter", 10_000, 8) == pytest.approx(30)
    # A ring's AllGather passes 7 shares of 2,500 bytes through the interfaces of 4 ranks.
    assert cluster().time_us("allgather", "inter", 10_000, 8, 4) == pytest.approx(10 + 4.375)


def test_measured_curves_are_of_nodes_that_share_interfaces_alike() -> None:
    calibrated = load_cluster(CONFIGS.parent / "docs" / "benchmarks" / "regret_2x4.yaml")
    with pytest.raises(ValueError, match=r"^ranks_per_node: got 2, must share interfaces as the"):
        calibrated.for_job(2)
    # An interface for each rank.
    assert replace(calibrated, nics_per_node=4).for_job(2).nics_per_node == 2


def test_another_network_rate_scales_the_bytes_and_not_the_start() -> None:
    before = cluster(curve({size: 10 + size / 1_000 for size in (1_000, 10_000, 100_000)}))
    half = before.at_rate("inter", 0.5)
    for size in (0, 1_000, 10_000, 1_000_000):
        beyond_us = before.time_us("alltoall", "inter", size, 2) - 10
        assert half.time_us("alltoall", "inter", size, 2) == pytest.approx(10 + 2 * beyond_us)
    assert half.time_us("alltoall", "intra", 10_000, 4) == pytest.approx(2)
    # A line of 22 GB/s and 30 us; no file may have such a rate.
    fast = preset("a100_hdr").at_rate("inter", 100)
    assert fast.time_us("alltoall", "inter", 1e6) == pytest.approx(30 + 1e6 / 2.2e6)


def test_a_start_that_the_transfer_hides_is_not_added_to_it() -> None:
    # 30 us to start, or 1 us per 1,000 bytes, whichever is longer.
    hidden = curve({10**power: max(30, 10**power / 1_000) for power in range(3, 8)})
    # 30 - 1 + 2; 30 - 10 + 20; from 100,000 bytes on nothing but bytes.
    assert hidden.at_rate(0.5).times_us == pytest.approx((31, 40, 200, 2_000, 20_000), rel=1e-6)
    faster = hidden.at_rate(2).times_us
    # Half of the bytes' time is gone, but starting takes what it takes: 30 us, less the bytes of
    # the first points at their own slope.
    assert faster[2:] == pytest.approx((50, 500, 5_000), rel=1e-6)
    assert all(29 < time <= 30 for time in faster[:2])


def test_contention_as_measured_else_as_the_memory_that_a_link_leaves() -> None:
    """Of 100 GB/s of memory, 10 read and 10 written by the node link leave 80, the network 98."""
    rows = (("memory", "network", 1.1), ("network", "memory", 1.6))
    found = cluster(contention=rows)
    assert found.factor("intra", "memory") == found.factor("memory", "intra") == 100 / 80
    assert (found.factor("memory", "inter"), found.factor("inter", "memory")) == (1.1, 1.6)
    assert (found.factor("inter", "intra"), found.factor("inter", "inter")) == (1.0, 2.0)
    assert cluster().factor("inter", "memory") == 100 / 98


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 10**12), st.floats(1e-3, 1e9), min_size=2))
def test_rows_are_read_as_they_are_written(points: dict[int, float]) -> None:
    row = curve(dict(sorted(points.items())))
    again = Curve.from_text(str(row))
    assert replace(again, times_us=row.times_us) == row
    assert again.times_us == pytest.approx(row.times_us, rel=1e-11)


@cache
def published_points() -> dict[tuple[str, str, int], dict[int, float]]:
    """(GPU, operation, ranks) -> bytes -> us of the published table."""
    lines = PUBLISHED.read_text(encoding="utf-8").splitlines()
    points: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        points[row["gpu"], row["operation"], int(row["ranks"])][int(row["bytes"])] = float(
            row["us"]
        )
    return points


def test_published_curves_are_those_of_the_table_to_the_digit() -> None:
    """A table counts the part that a rank keeps, of which 1 / ranks; no chain reduces in one."""
    names, num_curves = {operation: name for name, operation in OPERATIONS.items()}, 0
    for gpu, curves in published_curves().items():
        for each in curves:
            ranks, num_curves = each.group_size, num_curves + 1
            points = published_points()[gpu, names[each.operation], ranks]
            moved = {size * (ranks - 1) // ranks: us for size, us in points.items()}
            # A time that a larger size undercuts is noise.
            smooth = {n: min(us for size, us in moved.items() if size >= n) for n in moved}
            assert dict(zip(each.sizes_bytes, each.times_us, strict=True)) == smooth
    assert num_curves == 2 * 2 * 3
    # 8 ranks, 64 MiB each, of which 7/8 leave a rank.
    us = preset("h100_8x_ndr").time_us("alltoall", "intra", 7 * 2**23, 8)
    assert us == pytest.approx(published_points()["H100-80GB-HBM3", "alltoall", 8][2**26])


def test_published_curves_predict_sizes_that_are_left_out() -> None:
    """Every second size from its neighbours, from 256 KiB on: all GPUs, operations and ranks."""
    assert len(published_points()) == 2 * 3 * 3
    errors = []
    for points in published_points().values():
        sizes = list(points)
        assert len(sizes) == 21
        for first in (0, 1):
            left = curve({size: points[size] for size in sizes[first::2]})
            errors += [
                abs(left.time_us(size) / points[size] - 1)
                for size in sizes[1 - first :: 2]
                if size >= 2**18 and left.sizes_bytes[0] < size < left.sizes_bytes[-1]
            ]
    assert np.median(errors) <= 0.05
    assert np.quantile(errors, 0.9) <= 0.15


@pytest.mark.parametrize("case", by_hand("efa"))
def test_measured_messages_on_efa(case: dict[str, float]) -> None:
    cluster = preset("h100_efa_p5")
    found_us = cluster.time_us("alltoall", "inter", case["num_bytes"], int(case["ranks"]), 8)
    assert found_us == pytest.approx(case["us"], rel=case["within"])


def test_published_curves_do_not_fall_at_any_rate() -> None:
    """Nor do those of other GPUs, which are made from them."""
    curves = [entry for of_gpu in published_curves().values() for entry in of_gpu]
    assert not any(entry.at_rate(ratio).falls for entry in curves for ratio in (0.5, 1, 1.7, 4))


PRESETS = sorted(path.stem for path in (CONFIGS / "clusters").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_no_candidate_gets_faster_with_more_tokens(name: str) -> None:
    """Ours in every number of chunks and stock's, in a node and over two.

    The choice itself may: a plainer chain is preferred to one that is little faster.
    """
    cluster = preset(name)
    for ep in (cluster.ranks_per_node, 2 * cluster.ranks_per_node):
        if 128 % ep or ep > cluster.num_ranks:
            continue
        fewer: dict[tuple[str, int | None], float] = {}
        for tokens in (2**power for power in range(15)):
            request = PlanRequest(
                model="qwen3_30b_a3b", cluster=cluster, world_size=ep, tp=1, ep=ep, tokens=tokens
            )
            plan = plan_request(request)
            times_us = {
                (candidate.chain, candidate.num_chunks): candidate.predicted_us
                for candidate in plan.candidates
                if candidate.predicted_us is not None
            }
            times_us |= {(f"stock {chain}", None): us for chain, us in plan.stock_times_us.items()}
            for key, us in times_us.items():
                # Sums in another order may differ in the last bits.
                assert us >= fewer.get(key, 0.0) * (1 - 1e-9), (key, tokens)
            fewer = times_us


def test_values_that_are_hardly_meant_are_noted() -> None:
    assert not any(preset(name).doubts for name in PRESETS)
    assert not cluster(CURVE).doubts
    falling = cluster(curve({1_000: 9.0, 2_000: 8.0}), nics=3, memory_gb_per_rank=500.0)
    uneven, memory, falls = falling.doubts
    assert uneven.startswith("nics_per_node 3 does not divide ranks_per_node 4")
    assert memory == "memory_gb_per_rank 500: no GPU has more than 310"
    assert falls.startswith("curve alltoall network 2 falls")
    (many,) = cluster(CURVE, nics=64).doubts
    assert many == "nics_per_node 64: 64 of a host, and no machine has more than 32"
    # In a rack each host counts.
    rack = cluster(CURVE, ranks=64, nics=64, ranks_per_host=4)
    assert not rack.doubts
