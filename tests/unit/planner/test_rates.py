"""Rates: written with their unit, shown in every plan, with their published range."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from clusters import CONFIGS, INSTANT, cluster_of, link, preset, shape_of
from commands import Monta

from monta_megatron.common import strict_yaml
from monta_megatron.planner.cluster import Cluster, Link
from monta_megatron.planner.cluster_file import dump_cluster, load_cluster
from monta_megatron.planner.curves import Curve, Rate
from monta_megatron.planner.plan import plan

A800 = preset("a800_2x8_ib200")


@pytest.mark.parametrize(
    ("text", "gbytes_per_s"),
    [
        ("100 Gb/s", 12.5),
        ("12.5 GB/s", 12.5),
        (" 12.5GB/s", 12.5),
        ("500 Mb/s", 0.0625),
        ("62.5 MB/s", 0.0625),
        ("3.35 TB/s", 3350.0),
        ("1.6 Tb/s", 200.0),
        ("800 Kb/s", 1e-4),
        ("1e-3 GB/s", 1e-3),
        ("200 Gbps", 25.0),
        ("200 Gbit/s", 25.0),
    ],
)
def test_bits_and_bytes(text: str, gbytes_per_s: float) -> None:
    rate = Rate.from_text(text)
    assert rate.gbytes_per_s == pytest.approx(gbytes_per_s, rel=1e-15)
    assert Rate.from_text(str(rate)) == rate


def test_a_rate_is_written_as_it_is_read() -> None:
    for gbytes_per_s in (47.0, 0.03548355340483933, 1e-7, 1 / 3, 3350.0, 1e20):
        assert Rate.from_text(str(Rate(gbytes_per_s))) == Rate(gbytes_per_s)


def test_bits_taken_for_bytes_are_refused_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_cluster(cluster_of(link(200.0), link(450.0), link(1e3))))
    with pytest.raises(ValueError, match=r"network.rate: got 200 GB/s .* must be at most"):
        load_cluster(path)


def test_the_rate_of_curves_is_that_of_the_largest_size() -> None:
    curve = Curve(
        operation="alltoall",
        resource="inter",
        group_size=8,
        sizes_bytes=(1_000, 2_000_000),
        times_us=(40.0, 1_000.0),
    )
    measured = replace(A800, curves=(curve,), network=None)
    assert plan(shape_of(16), measured).rates["inter"] == "2 GB/s (16 Gb/s)"
    rates = [each.rate_of("intra").gbytes_per_s for each in (measured, preset("a100_hdr"))]
    assert 0.667 < rates[0] / rates[1] < 0.7


def test_a_price_has_the_range_of_the_published_rates(monta: Monta) -> None:
    cluster = preset("h100_8x_ndr")
    slow, fast = (cluster.at_end(end) for end in (0, 1))
    assert [
        (each.rate_of("inter"), each.rate_of("memory"), each.host.speed) for each in (slow, fast)
    ] == [(Rate(46.0), Rate(2475.0), 0.5), (Rate(49.0), Rate(2959.0), 1.9)]
    assert slow.rate_of("intra") == fast.rate_of("intra") == cluster.rate_of("intra")
    # Measured figures have none.
    measured = replace(cluster, network=link(47.0), memory=link(2475.0), host=INSTANT)
    assert measured.at_end(0) == measured.at_end(1)

    command = ["plan", "--model", "qwen3_235b_a22b", "--cluster", "h100_8x_ndr", "--tp", "2"]
    planned = monta.document(*command, "--world-size", "128", "--ep", "16", "--pp", "4")
    low, high = planned["range_us"]
    assert low < planned["predicted_us"] < high
    low, high = planned["benefit"]["ratio_range"]
    assert low <= planned["benefit"]["ratio"] <= high
    ranges = {each["chain"]: each["range_us"] for each in planned["candidates"] if each["range_us"]}
    assert ranges.keys() == {planned["chain"], "alltoall"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": Rate(22.0), "range": (Rate(23.0), Rate(24.0))}, "range: .* must hold rate, 22"),
        ({}, "rate: got None, must or curves be given"),
        ({"curves": "H100"}, "curves: got H100, must be one of A100-SXM4-80GB, H100-80GB-HBM3"),
    ],
)
def test_a_link_that_says_nothing_certain_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link(source="x", **fields)
    with pytest.raises(ValueError, match=r"range: got \[2.0, 3.0\], must hold speed, 1"):
        replace(INSTANT, range=(2.0, 3.0))


def test_presets_are_short_and_written_as_they_are_read() -> None:
    paths = sorted((CONFIGS / "clusters").glob("*.yaml"))
    lines = {path.stem: len(path.read_text().splitlines()) for path in paths}
    assert max(lines.values()) <= 40 and sum(lines.values()) <= 640
    for path in paths:
        text = dump_cluster(load_cluster(path))
        assert strict_yaml.build(Cluster, yaml.safe_load(text), "x") == load_cluster(path)
