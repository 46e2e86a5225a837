"""What the network carries: bytes across rails, and nodes that share their interfaces otherwise."""

from dataclasses import replace

import pytest
from clusters import CONFIGS, LAUNCH, link, preset, shape_of

from monta_megatron.chains.program import COLLECTIVES, PricedOperation
from monta_megatron.common.units import Rate
from monta_megatron.planner.cluster import Cluster, NodeSizes
from monta_megatron.planner.cluster_file import load_cluster, with_inter_rate
from monta_megatron.planner.curves import Curve
from monta_megatron.planner.plan import plan

RAILS = replace(link("inter", 0.0, 40.0), cross_rail_rate=Rate(10.0))
LINKS = (link("intra", 0.0, 400.0), link("memory", 0.0, 2000.0))
MB_BYTES = 10**6


def cluster_of(ranks: int, nics: int, **fields: object) -> Cluster:
    """Two nodes."""
    return Cluster(
        name="by hand",
        num_nodes=2,
        ranks_per_node=ranks,
        nics_per_node=nics,
        kind="measured",
        source="by hand",
        launch=LAUNCH,
        **{"links": LINKS, **fields},  # type: ignore[arg-type]
    )


def test_bytes_across_rails_take_their_own_rate() -> None:
    cluster = cluster_of(8, 8, links=(RAILS, *LINKS))
    # Of 8 MB to the 8 ranks of another node 1 MB stays on the rail, 25 us; 7 MB cross, 700 us.
    assert cluster.time_us("alltoall", "inter", 8 * MB_BYTES, 16, 8).us == pytest.approx(725)
    # A rail, one rank on each node, does not cross any; nor does a ring, in which 8 NICs work.
    assert cluster.time_us("alltoall", "inter", 8 * MB_BYTES, 2, 1).us == pytest.approx(200)
    assert cluster.time_us("allgather", "inter", 8 * MB_BYTES, 16, 8).us == pytest.approx(25)
    half = with_inter_rate(cluster, 0.5)
    assert half.time_us("alltoall", "inter", 8 * MB_BYTES, 16, 8).us == pytest.approx(1450)


@pytest.mark.parametrize(
    ("of", "rate", "message"),
    [
        (
            link("intra", 0.0, 40.0),
            10.0,
            "cross_rail_rate: got 10 GB/s of intra, must be of inter and at",
        ),
        (RAILS, 41.0, "cross_rail_rate: got 41 GB/s of inter, must be .* at most rate, 40 "),
    ],
)
def test_what_crosses_no_rail_is_refused(of: object, rate: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(of, cross_rail_rate=Rate(rate))  # type: ignore[type-var]


def test_a_plan_on_efa_keeps_to_its_rails() -> None:
    with_rails = preset("h100_efa_p5")
    without = replace(
        with_rails, links=tuple(replace(each, cross_rail_rate=None) for each in with_rails.links)
    )
    shape = shape_of(16)
    slow, fast = (plan(shape, cluster).best_us() for cluster in (with_rails, without))
    # Flat chains cross them, the hierarchical ones do so with their counts alone.
    assert slow["alltoall"] > 1.5 * fast["alltoall"]
    assert slow["hierarchical_alltoall"] == pytest.approx(fast["hierarchical_alltoall"], rel=1e-3)


def curve(operation: PricedOperation, group_size: int) -> Curve:
    """1 us for 1 KB, of 0.5 to 2 MB."""
    return Curve(
        operation=operation,
        resource="inter",
        group_size=group_size,
        sizes_bytes=(MB_BYTES // 2, MB_BYTES, 2 * MB_BYTES),
        times_us=(500.0, 1000.0, 2000.0),
        kind="measured",
        source="by hand",
    )


@pytest.mark.parametrize(
    ("ranks", "nics", "alltoall_us", "allgather_us"),
    [
        (4, 1, 1000, 1000),
        # 2 ranks for 4 on a NIC: half as many bytes cross it. A ring crosses it once in any case.
        (2, 1, 500, 1000),
        (8, 1, 2000, 1000),
        # Each NIC of 2 carries half.
        (4, 2, 500, 500),
        (8, 2, 1000, 500),
    ],
)
def test_another_sharing_of_a_nic_is_converted(
    ranks: int, nics: int, alltoall_us: float, allgather_us: float
) -> None:
    curves = tuple(curve(operation, 8) for operation in COLLECTIVES)
    node = NodeSizes(ranks=4, nics=1)
    cluster = cluster_of(ranks, nics, curves=curves, calibrated_node=node)
    size = 2 * ranks
    assert cluster.time_us("alltoall", "inter", MB_BYTES, size, ranks).us == pytest.approx(
        alltoall_us
    )
    assert cluster.time_us("allgather", "inter", MB_BYTES, size, ranks).us == pytest.approx(
        allgather_us
    )


def test_nodes_of_two_predicted_from_nodes_of_four() -> None:
    # docs/results.md has what 2 nodes of 2 ranks took at the same rate. In the
    # other chains the cores, which half as many ranks share there, count as much as the network.
    measured_us = 1_110_000
    calibrated = load_cluster(CONFIGS.parent / "docs" / "benchmarks" / "regret_2x4.yaml")
    converted = replace(calibrated, ranks_per_node=2)
    by_hand = replace(converted, calibrated_node=None)
    shape = shape_of(4, ranks_per_node=2, num_experts=48, tokens=512, hidden=1024)
    wrong_us, right_us = (
        plan(replace(shape, value_bytes=4), cluster, num_chunks=(1,)).best_us()["alltoall"]
        for cluster in (by_hand, converted)
    )
    assert wrong_us > 1.8 * measured_us
    assert right_us == pytest.approx(measured_us, rel=0.1)
