"""The preset that stands in for a cluster of which nothing was measured."""

import pytest

from monta_megatron.core import Layout
from monta_megatron.planner.cluster_file import nearest_preset, uncalibrated


@pytest.mark.parametrize(
    ("gpu", "ranks_per_node", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 8, "h100_8x_ndr"),
        ("NVIDIA A100-SXM4-80GB", 8, "a100_hdr"),
        ("NVIDIA A100-SXM-64GB", 4, "a100_4x_hdr"),
        ("NVIDIA H20", 8, "h20_8x_roce400"),
        ("NVIDIA GH200 120GB", 4, "gh200_4x_200g"),
        ("NVIDIA A100-PCIE-40GB", 8, "a100_pcie_hdr"),
        ("NVIDIA A800-SXM4-80GB", 8, "a800_2x8_ib200"),
        ("NVIDIA GB200", 4, "gb200_nvl72"),
        # Of the same family.
        ("NVIDIA H200", 8, "h100_8x_ndr"),
        ("NVIDIA B200", 8, "b300_efa_p6"),
        # Of none.
        ("Tesla V100-SXM2-32GB", 8, "h100_8x_ndr"),
        (None, 4, "emulated_2x4_500mbit"),
        (None, 16, "emulated_2x8_500mbit"),
    ],
)
def test_the_nearest_preset(gpu: str | None, ranks_per_node: int, preset: str) -> None:
    assert nearest_preset(gpu, ranks_per_node) == preset


def test_it_has_the_nodes_of_the_exchange_and_says_why() -> None:
    layout = Layout(ep=4, etp=1, num_local_experts=1, rank=0, nodes=(0, 0, 1, 1))
    cluster = uncalibrated(layout, None)
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.nics_per_node) == (2, 2, 1)
    assert cluster.policy == "host"
    assert cluster.name == (
        "an uncalibrated cluster (preset emulated_2x4_500mbit, nearest to CPU ranks, 2 per node)"
    )
