"""Costs of an emulated cluster that nobody has calibrated."""

from pathlib import Path

import pytest

from monta_megatron.emulation.cluster import EmulatedCluster, default_costs
from monta_megatron.planner.cluster_file import dump_cluster, load_cluster


@pytest.mark.parametrize("inter_mbit", [1.0, 500.0, 100_000.0])
def test_every_rate_that_can_be_asked_for(inter_mbit: float, tmp_path: Path) -> None:
    costs = default_costs(EmulatedCluster(nodes=2, ranks_per_node=4, inter_mbit=inter_mbit))
    path = tmp_path / "costs.yaml"
    path.write_text(dump_cluster(costs))
    assert load_cluster(path) == costs
    assert "not calibrated" in costs.name
    # A rank has a quarter of the network; 8 bits to a byte.
    beyond_us = costs.time_us("alltoall", "inter", 1e9) - costs.time_us("alltoall", "inter", 0)
    most_mbit = 1e9 * 8 / costs.time_us("alltoall", "intra", 1e9)
    assert beyond_us == pytest.approx(1e9 * 8 / min(inter_mbit / 4, most_mbit), rel=1e-3)
