"""Costs of an emulated cluster that nobody has calibrated."""

from dataclasses import replace
from pathlib import Path

import pytest

from monta_megatron.chains import CHAINS
from monta_megatron.common import strict_yaml
from monta_megatron.core import Layout, Shape
from monta_megatron.emulation.cluster import SOURCE, EmulatedCluster, default_costs
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import dump_cluster
from monta_megatron.planner.plan import plan
from monta_megatron.planner.routing import UniformRouting

REPOSITORY = Path(__file__).parents[2]


def emulated(**changes: object) -> EmulatedCluster:
    values = {"nodes": 2, "ranks_per_node": 4, "nic_per": "node", "inter_mbit": 500.0}
    return EmulatedCluster(**{**values, **changes})  # type: ignore[arg-type]


def test_all_but_the_rate_is_what_the_preset_says() -> None:
    preset = strict_yaml.load(Cluster, REPOSITORY / SOURCE)

    def figures(cluster: Cluster) -> object:
        links = [(link.rate, link.start_us) for link in cluster.links.values()]
        return links, replace(cluster.host, source="x"), cluster.policy, cluster.resources

    assert figures(default_costs(emulated())) == figures(preset)
    assert "not calibrated" in default_costs(emulated()).name


@pytest.mark.parametrize("nic_per", ["node", "rank"])
@pytest.mark.parametrize("inter_mbit", [1.0, 500.0, 100_000.0])
def test_every_rate_that_can_be_asked_for(nic_per: str, inter_mbit: float, tmp_path: Path) -> None:
    costs = default_costs(emulated(nic_per=nic_per, inter_mbit=inter_mbit))
    path = tmp_path / "costs.yaml"
    path.write_text(dump_cluster(costs))
    assert strict_yaml.load(Cluster, path) == costs
    # A rank's share of the network; 8 bits to a byte.
    share = 1 if nic_per == "rank" else 1 / 4
    beyond_us = costs.time_us("alltoall", "inter", 1e9) - costs.time_us("alltoall", "inter", 0)
    most_mbit = 1e9 * 8 / costs.time_us("alltoall", "intra", 1e9)
    assert beyond_us == pytest.approx(1e9 * 8 / min(inter_mbit * share, most_mbit), rel=1e-3)


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
    planned = plan(shape, default_costs(emulated(ranks_per_node=2)))
    assert not CHAINS[planned.chain].serial and planned.num_chunks > 1
