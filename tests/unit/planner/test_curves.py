"""Curves: through their points, a line beyond them; NCCL's published ones; costs of a cluster."""

import csv
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from clusters import CONFIGS, cluster_of, link, preset

from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.curves import OPERATIONS, PUBLISHED, Curve, published_curves


def curve(**changes: Any) -> Curve:
    values = {
        "operation": "alltoall",
        "resource": "inter",
        "group_size": 2,
        "sizes_bytes": (1_000, 10_000, 100_000),
        "times_us": (20.0, 40.0, 220.0),
    }
    return Curve(**{**values, **changes})


def cluster(*curves: Curve, **fields: Any) -> Cluster:
    """1, 10 and 100 GB/s."""
    links = link(1.0, 10.0), link(10.0, 1.0), link(100.0, 1.0)
    return cluster_of(*links, **{"ranks": 4, "nics": 4, "curves": curves, **fields})


def test_straight_from_point_to_point_and_beyond_the_ends() -> None:
    for num_bytes, us in ((1_000, 20), (10_000, 40), (100_000, 220), (5_500, 30)):
        assert curve().time_us(num_bytes) == pytest.approx(us)
    # Exactly 10 us + bytes / 500: the line goes on.
    sizes = (1_000, 2_000, 4_000, 8_000, 16_000)
    straight = curve(sizes_bytes=sizes, times_us=tuple(10 + size / 500 for size in sizes))
    for num_bytes, us in ((0, 10), (500, 11), (160_000, 330)):
        assert straight.time_us(num_bytes) == pytest.approx(us)
    steep = curve(sizes_bytes=(1_000, 2_000, 3_000), times_us=(1.0, 20.0, 40.0))
    assert steep.time_us(0) == 0.0
    falling = curve(sizes_bytes=(1_000, 2_000, 3_000), times_us=(9.0, 8.0, 7.0))
    assert falling.time_us(1e9) == 7.0 and falling.time_us(0) == 9.0


def test_the_nearest_group_is_taken() -> None:
    groups = cluster(curve(), curve(group_size=16, times_us=(30.0, 60.0, 330.0)))
    assert groups.time_us("alltoall", "inter", 10_000, 2) == pytest.approx(40)
    assert groups.time_us("alltoall", "inter", 10_000, 8) == pytest.approx(60)
    # Of two that are as near, the larger.
    groups = cluster(curve(), curve(group_size=8, times_us=(30.0, 60.0, 330.0)))
    assert groups.time_us("alltoall", "inter", 1_000, 4) == pytest.approx(30)


def test_what_stands_in_for_an_operation_without_a_curve() -> None:
    gathers = cluster(curve(), curve(operation="copy", resource="memory", group_size=1))
    assert gathers.time_us("sum", "memory", 10_000) == pytest.approx(40)
    assert gathers.time_us("allgather", "inter", 10_000, 2) == pytest.approx(40)
    # No curve at all: the line, 1 us + 10,000 bytes at 10 GB/s.
    assert gathers.time_us("alltoall", "intra", 10_000, 4) == pytest.approx(2)


def test_ranks_share_the_network_interfaces_of_their_node() -> None:
    """10 us + 10,000 bytes at 1 GB/s, or at half of it."""
    assert cluster().time_us("alltoall", "inter", 10_000, 8) == pytest.approx(20)
    assert cluster(nics=2).time_us("alltoall", "inter", 10_000, 8) == pytest.approx(30)
    # A ring's AllGather crosses once per node: each of its 4 ranks' interfaces carries a quarter.
    assert cluster().time_us("allgather", "inter", 10_000, 8, 4) == pytest.approx(12.5)


def test_measured_curves_are_of_nodes_that_share_interfaces_alike() -> None:
    calibrated = load_cluster(CONFIGS.parent / "docs" / "benchmarks" / "regret_2x4.yaml")
    with pytest.raises(ValueError, match=r"^ranks_per_node: got 2, must share interfaces as the"):
        calibrated.of_job(2)
    # An interface for each rank.
    assert replace(calibrated, nics_per_node=4).of_job(2).nics_per_node == 2


def test_another_network_rate_scales_the_bytes_and_not_the_start() -> None:
    sizes = (1_000, 10_000, 100_000)
    line = curve(sizes_bytes=sizes, times_us=tuple(10 + size / 1_000 for size in sizes))
    before = cluster(line)
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
    sizes = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
    hidden = curve(sizes_bytes=sizes, times_us=tuple(max(30, size / 1_000) for size in sizes))
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


def test_rows_are_read_as_they_are_written() -> None:
    for row in (curve(), curve(operation="sum", resource="memory", times_us=(0.1, 2e5, 1 / 3))):
        again = Curve.from_text(str(row))
        assert replace(again, times_us=row.times_us) == row
        assert again.times_us == pytest.approx(row.times_us, rel=1e-11)


def test_a_bad_row_is_refused() -> None:
    for text in (
        *("", "alltoall network 8", "alltoall network 8 1:1", "alltoall network 8 1:1 2"),
        *("alltoall inter 8 1:1 2:2", "alltoall memory 8 1:1 2:2", "copy network 1 1:1 2:2"),
        *("send network 8 1:1 2:2", "alltoall network 8 2:1 1:2", "copy memory 1 1:0 2:2"),
        *("copy memory 1 1:nan 2:2", "copy memory x 1:1 2:2", "copy memory 1 1.5:1 2:2"),
    ):
        with pytest.raises(ValueError):
            Curve.from_text(text)


def published_points() -> dict[tuple[str, str, int], list[tuple[int, float]]]:
    """(GPU, operation, ranks) -> (bytes, us) of the published table."""
    lines = PUBLISHED.read_text(encoding="utf-8").splitlines()
    points: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        key = row["gpu"], row["operation"], int(row["ranks"])
        points.setdefault(key, []).append((int(row["bytes"]), float(row["us"])))
    return points


def test_published_curves_are_those_of_the_table_to_the_digit() -> None:
    """A table counts the part that a rank keeps, of which 1 / ranks; no chain reduces in one."""
    table = {
        (gpu, OPERATIONS[operation], ranks): [
            (size * (ranks - 1) // ranks, us) for size, us in points
        ]
        for (gpu, operation, ranks), points in published_points().items()
        if operation in OPERATIONS
    }
    assert [len(points) for points in table.values()] == 2 * 2 * 3 * [21]
    assert table == {
        (gpu, each.operation, each.group_size): [*zip(each.sizes_bytes, each.times_us, strict=True)]
        for gpu, curves in published_curves().items()
        for each in curves
    }
    # 8 ranks, 64 MiB each, of which 7/8 leave a rank.
    us = dict(published_points()["H100-80GB-HBM3", "alltoall", 8])[2**26]
    found_us = preset("h100_8x_ndr").time_us("alltoall", "intra", 7 * 2**23, 8)
    assert found_us == pytest.approx(us)


def test_published_curves_predict_sizes_that_are_left_out() -> None:
    """Every second size from its neighbours, from 256 KiB on: all GPUs, operations and ranks."""
    assert len(published_points()) == 2 * 3 * 3
    errors = []
    for points in published_points().values():
        for first in (0, 1):
            sizes, times = zip(*points[first::2], strict=True)
            left = curve(sizes_bytes=sizes, times_us=times)
            errors += [
                abs(left.time_us(size) / us - 1)
                for size, us in points[1 - first :: 2]
                if size >= 2**18 and sizes[0] < size < sizes[-1]
            ]
    assert np.median(errors) <= 0.05
    assert np.quantile(errors, 0.9) <= 0.15


@pytest.mark.parametrize(
    ("nodes", "size_bytes", "bus_gbytes_per_s"), [(4, 2**26, 45.1), (8, 2**26, 40.4)]
)
def test_large_messages_on_efa(nodes: int, size_bytes: int, bus_gbytes_per_s: float) -> None:
    """awslabs/awsome-distributed-ai 95b939cd; bus bandwidth is size / time * (n - 1) / n."""
    ranks = 8 * nodes
    moved = size_bytes * (ranks - 8) / ranks
    us = preset("h100_efa_p5").time_us("alltoall", "inter", moved, ranks, 8)
    assert size_bytes / us * 1e-3 * (ranks - 1) / ranks == pytest.approx(bus_gbytes_per_s, rel=0.15)


@pytest.mark.parametrize(
    ("kib", "us"),
    [(1, 100), (64, 122), (128, 130), (256, 154), (256, 161), (512, 204), (512, 213), (1024, 303)],
)
def test_small_messages_on_efa(kib: int, us: float) -> None:
    """16 ranks on 2 nodes: bottlerocket-kernel-kit issues 424 and 313."""
    found = preset("h100_efa_p5").time_us("alltoall", "inter", kib * 1024 / 2, 16, 8)
    assert found == pytest.approx(us, rel=0.3)
