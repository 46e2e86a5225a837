"""Rates: written with their unit, shown in every plan, with their published range."""

from dataclasses import replace
from itertools import product

import golden
import pytest
import yaml
from clusters import CONFIGS, GOLDEN, INSTANT, link, preset, shape_of
from hypothesis import given, settings
from hypothesis import strategies as st

from monta_megatron.chains import CHAINS
from monta_megatron.common import strict_yaml
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import dump_cluster, load_cluster
from monta_megatron.planner.curves import Curve, Rate
from monta_megatron.planner.plan import plan
from monta_megatron.planner.price import price
from monta_megatron.planner.stock import stock_times_us
from monta_megatron.planner.training import Training


def test_bits_and_bytes() -> None:
    golden.check_cases(
        GOLDEN / "rates.txt", lambda text: f"{Rate.from_text(text).gbytes_per_s:.15g} GB/s"
    )


@settings(deadline=None)
@given(st.floats(1e-9, 1e21))
def test_a_rate_is_written_as_it_is_read(gbytes_per_s: float) -> None:
    assert Rate.from_text(str(Rate(gbytes_per_s))) == Rate(gbytes_per_s)


def test_the_rate_of_curves_is_that_of_the_largest_size() -> None:
    curve = Curve.from_text("alltoall network 8 1000:40 2000000:1000")
    measured = replace(preset("a800_2x8_ib200"), curves=(curve,), network=None)
    assert plan(shape_of(16), measured).rates["inter"] == "2 GB/s (16 Gb/s)"
    rates = [each.rate_of("intra").gbytes_per_s for each in (measured, preset("a100_hdr"))]
    # Of a rank, where two share an interface.
    assert preset("a800_4x200_roce").rate_of("inter") == Rate(11.0)
    assert 0.667 < rates[0] / rates[1] < 0.7


def test_a_price_has_the_range_of_the_published_rates() -> None:
    cluster = preset("h100_8x_ndr")
    network, memory = cluster.network.range, cluster.memory.range
    assert network is not None and memory is not None
    rates = ([rate.gbytes_per_s for rate in link_range] for link_range in (network, memory))
    ends = product(*rates, (0.5, 1.9))
    assert [
        (*(each.rate_of(link).gbytes_per_s for link in ("inter", "memory")), each.host.speed)
        for each in cluster.corners()
    ] == [pytest.approx(corner) for corner in ends]
    assert {each.rate_of("intra") for each in cluster.corners()} == {cluster.rate_of("intra")}
    found = plan(shape_of(16), cluster)
    assert found.range_us is not None
    assert found.range_us[0] <= found.predicted_us <= found.range_us[1]
    # Measured figures have none.
    measured = replace(cluster, network=link(47.0), memory=link(2475.0), host=INSTANT)
    assert measured.corners() == [measured]
    assert plan(shape_of(16), measured).ratio_range is None


def test_a_ratio_has_the_range_of_all_corners() -> None:
    """A slow network on a fast host gains most: it is no end of the times."""
    cluster = preset("h800_8x_ndr")
    found = plan(shape_of(16), cluster)
    chain, ratios = CHAINS[found.chain], []
    for corner in cluster.corners():
        stock_us = min(stock_times_us(shape_of(16), corner, Training()).values())
        ours_us = price(shape_of(16), corner, chain, found.num_chunks).total_us
        ratios.append(stock_us / ours_us)
    assert found.ratio_range == (min(ratios), max(ratios))
    assert max(ratios[0], ratios[-1]) < max(ratios)


def test_presets_are_short_and_written_as_they_are_read() -> None:
    for path in sorted((CONFIGS / "clusters").glob("*.yaml")):
        assert len(path.read_text().splitlines()) <= 40
        text = dump_cluster(load_cluster(path))
        assert strict_yaml.build(Cluster, yaml.safe_load(text), "x") == load_cluster(path)
