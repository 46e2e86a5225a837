"""What a budget of CTAs does to the node link's price, and what is said of another budget."""

from dataclasses import replace

import pytest

from monta_megatron.chains.communicators import DEFAULT_CTAS, Ctas
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.curves import Curve


def preset() -> Cluster:
    return load_cluster("h100_8x_ndr")


# 335 GB/s of the link, 23 GB/s of a CTA: 8 carry 184 and 16 would carry 368.
@pytest.mark.parametrize(("ctas", "gbytes_per_s"), ((1, 23), (8, 184), (14, 322), (16, 335)))
def test_the_node_link_has_the_rate_of_its_ctas(ctas: int, gbytes_per_s: float) -> None:
    cluster = preset().with_ctas(Ctas(rail=4, node=ctas))
    first, second = (cluster.time_us("alltoall", "intra", size, 8).us for size in (0.0, 1e9))
    assert second - first == pytest.approx(1e6 / gbytes_per_s)
    assert not cluster.doubts


def test_the_default_budget_is_what_is_priced() -> None:
    cluster = preset()
    assert cluster.ctas == DEFAULT_CTAS
    assert cluster.with_ctas(DEFAULT_CTAS) is cluster


def test_the_network_has_no_limit_by_ctas() -> None:
    cluster = preset()
    few = cluster.with_ctas(Ctas(rail=1, node=1))
    assert few.time_us("alltoall", "inter", 1e9, 2) == cluster.time_us("alltoall", "inter", 1e9, 2)


def test_curves_of_another_budget_are_a_doubt() -> None:
    curve = Curve(
        operation="alltoall",
        resource="intra",
        group_size=8,
        sizes_bytes=(1000, 1000000),
        times_us=(10.0, 20.0),
        kind="measured",
        source="test",
    )
    cluster = replace(preset(), curves=(curve,), node_ctas=16)
    # Of the rail nothing was measured.
    (doubt,) = cluster.with_ctas(Ctas(rail=2, node=8)).doubts
    assert doubt == "measured with 16 CTAs for a node, and 8 are given: calibrate again"
    assert not cluster.with_ctas(Ctas(rail=2, node=16)).doubts
