"""Curves that are refused, and sizes that are only marked: planted medians and recorded samples."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import yaml
from test_fit import LAYOUT

from monta_megatron.calibration.fit import (
    Medians,
    fit_curves,
    fit_host_costs,
    medians_of,
)
from monta_megatron.calibration.judge import marks, refusals
from monta_megatron.calibration.tasks import Passes, Point, Sample, points_of
from monta_megatron.chains.program import PricedOperation, Resource
from monta_megatron.planner.curves import Rate

RECORDED = yaml.safe_load(Path(__file__).with_name("recorded_samples.yaml").read_text())
# The emulated 2 x 2 that the samples are from.
RECORDED_LAYOUT = replace(LAYOUT, ep=4, nodes=(0, 0, 1, 1))
QUIET = ("quiet, 3 runs", "quiet, 14 runs", "quiet, faster")
IN_MEMORY = {"copy memory 1", "sum memory 1"}
ON_LINKS = {
    *("alltoall network 2", "alltoall network 4", "allgather network 4"),
    *("alltoall node_link 2", "allgather node_link 2"),
}


def curve(*times_us: float, start_us: float = 0.0, runs: int = 3, **fields: object) -> Medians:
    """Medians of an AllToAll of 5 KiB, 20 KiB and so on between 4 ranks on 2 nodes."""
    points = [point for point in points_of(RECORDED_LAYOUT, "cpu") if point.resource == "inter"]
    named = [point for point in points if point.curve == ("inter", "alltoall", 4)]
    return Medians(
        points=tuple(point._replace(**fields) for point in named[: len(times_us)]),
        times_us=times_us,
        start_us=start_us,
        num_runs=(runs,) * len(times_us),
    )


@pytest.mark.parametrize(
    ("medians", "why"),
    [
        # Grown enough, but no longer than its start; a fall within noise; both bounds themselves.
        (curve(10, 20, 40, start_us=40), "81,920 bytes take no longer than to start the operation"),
        (curve(10, 20, 40, start_us=39), None),
        (curve(10, 10, 19), "81,920 bytes take 1.90 times as long as 5,120 bytes"),
        (curve(10, 10, 20), None),
        (curve(10, 100, 69), "81,920 bytes take 69 us, must be 0.7 times the 100 us of 20,480"),
        (curve(10, 100, 70), None),
        (curve(100, 69, 300), "20,480 bytes take 69 us, must be 0.7 times the 100 us of 5,120"),
        # Not beside a neighbor, but far below the slowest of all smaller ones.
        (curve(100, 80, 69, 300), "81,920 bytes take 69 us, must be 0.7 times the 100 us of 5,120"),
    ],
)
def test_bounds_by_hand(medians: Medians, why: str | None) -> None:
    found = refusals([medians], None, ranks_per_node=2)
    if why is None:
        assert not found
    else:
        (text,) = found
        assert text.startswith(f"alltoall network 4: {why}")


@pytest.mark.parametrize(
    ("gbytes_per_s", "fields", "is_refused"),
    [
        # 81,920 bytes in 8,192 us are 0.01 GB/s.
        (0.099, {}, False),
        (0.101, {}, True),
        (0.00101, {}, False),
        (0.00099, {}, True),
        # A ring takes its bytes across once per node of 2 ranks.
        (0.051, {"operation": "allgather"}, True),
        (0.049, {"operation": "allgather"}, False),
        # Nobody sets the rate of the node link.
        (0.101, {"resource": "intra"}, False),
    ],
)
def test_a_rate_ten_times_off_the_emulated_one(
    gbytes_per_s: float, fields: dict[str, object], is_refused: bool
) -> None:
    medians = curve(100, 1000, 8192, **fields)
    found = refusals([medians], Rate(gbytes_per_s), ranks_per_node=2)
    assert bool(found) == is_refused
    assert all("its rate is 0.01 GB/s (0.08 Gb/s), must be within 10 times" in x for x in found)
    # On real hardware nobody states one.
    assert not refusals([medians], None, ranks_per_node=2)


def test_small_sizes_and_single_runs_are_only_marked() -> None:
    medians = [curve(10, 20, 400, start_us=30), curve(10, 20, 40, runs=1), curve(1, 2, 4)]
    assert marks(medians) == [
        "alltoall network 4: 2 sizes of 3 take no longer than to start the operation, and count "
        "as 0.1 us",
        "alltoall network 4: 3 sizes of 3 ran once, and have no median",
    ]
    assert not refusals(medians, None, ranks_per_node=2)
    assert fit_curves(medians)[0].times_us == (0.1, 0.1, 370)


def recorded(name: str) -> tuple[list[Medians], Rate]:
    """Medians of recorded samples, and a rank's share of the emulated NIC."""
    samples: dict[Point | Passes, list[Sample]] = {}
    for key, runs in RECORDED[name]["points"].items():
        operation, resource, *numbers = key.split()
        assert operation in get_args(PricedOperation) and resource in get_args(Resource)
        samples[Point(operation, resource, *map(int, numbers))] = samples_of(runs)
    for num_chunks, runs in RECORDED[name]["passes"].items():
        samples[Passes(num_chunks)] = samples_of(runs)
    points = [point for point in points_of(RECORDED_LAYOUT, "cpu") if point in samples]
    host = fit_host_costs(samples, "host", source="recorded")
    return medians_of(points, samples, "host", host), Rate(RECORDED[name]["inter_mbit"] / 8e3 / 2)


def samples_of(runs: str) -> list[Sample]:
    """Runs as TIME/START."""
    return [Sample(*map(float, run.split("/"))) for run in runs.split()]


@pytest.mark.parametrize("name", QUIET)
def test_quiet_runs_are_believed(name: str) -> None:
    medians, nic_share = recorded(name)
    assert {entry.name for entry in medians} == ON_LINKS | IN_MEMORY
    assert not refusals(medians, nic_share, ranks_per_node=2)
    # Between nodes the emulator's rate is found.
    for fitted in fit_curves(medians):
        if fitted.resource == "inter" and fitted.operation == "alltoall":
            assert fitted.rate.gbytes_per_s == pytest.approx(nic_share.gbytes_per_s, rel=0.2)


def test_busy_runs_are_refused_by_name() -> None:
    """All of a collective seems to be its start; or sizes take alike, 14 times below the rate."""
    medians, nic_share = recorded("busy, clamped")
    found = dict(text.split(": ", 1) for text in refusals(medians, nic_share, ranks_per_node=2))
    assert set(found) == ON_LINKS | IN_MEMORY
    clamped = {name for name, why in found.items() if "no longer than to start" in why}
    assert clamped == ON_LINKS - {"alltoall network 2"}

    medians, nic_share = recorded("busy, flat")
    found = dict(text.split(": ", 1) for text in refusals(medians, nic_share, ranks_per_node=2))
    assert set(found) == ON_LINKS | IN_MEMORY
    (flat,) = (entry for entry in medians if entry.name == "alltoall network 4")
    rate = flat.points[-1].num_bytes * 1e-3 / flat.times_us[-1]
    assert nic_share.gbytes_per_s / rate > 13 and "times as long as 5,120 bytes" in found[flat.name]
