"""Costs of an emulated cluster that nobody has calibrated."""

from pathlib import Path

import pytest

from monta_megatron.chains import CHAINS
from monta_megatron.core import Layout, Shape
from monta_megatron.emulation.cluster import EmulatedCluster, default_costs
from monta_megatron.planner.cluster_file import dump_cluster, load_cluster
from monta_megatron.planner.plan import plan
from monta_megatron.planner.routing import UniformRouting


def emulated(ranks_per_node: int, inter_mbit: float) -> EmulatedCluster:
    return EmulatedCluster(nodes=2, ranks_per_node=ranks_per_node, inter_mbit=inter_mbit)


@pytest.mark.parametrize("inter_mbit", [1.0, 500.0, 100_000.0])
def test_every_rate_that_can_be_asked_for(inter_mbit: float, tmp_path: Path) -> None:
    costs = default_costs(emulated(4, inter_mbit))
    path = tmp_path / "costs.yaml"
    path.write_text(dump_cluster(costs))
    assert load_cluster(path) == costs
    assert "not calibrated" in costs.name
    # A rank has a quarter of the network; 8 bits to a byte.
    beyond_us = costs.time_us("alltoall", "inter", 1e9) - costs.time_us("alltoall", "inter", 0)
    most_mbit = 1e9 * 8 / costs.time_us("alltoall", "intra", 1e9)
    assert beyond_us == pytest.approx(1e9 * 8 / min(inter_mbit / 4, most_mbit), rel=1e-3)


def test_a_slow_network_is_overlapped() -> None:
    """The quick tour's recording: with figures of GPUs its chain was serial."""
    shape = Shape(
        layout=Layout(ep=4, etp=1, num_local_experts=4, rank=0, nodes=(0, 0, 1, 1)),
        hidden_size=1024,
        value_bytes=4,
        prob_bytes=4,
        routing=UniformRouting(num_experts=16, topk=4),
        tokens_per_rank=512,
    )
    planned = plan(shape, default_costs(emulated(2, 500.0)))
    assert not CHAINS[planned.chain].serial and planned.num_chunks > 1
