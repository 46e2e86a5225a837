"""`monta new cluster`: what is found, what is given and what is published, in one file."""

import re
from pathlib import Path

import yaml

from monta_megatron.cli.new import CLUSTER_RATES, GPU_NAMES
from monta_megatron.common import strict_yaml
from monta_megatron.common.units import Rate
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.tools.new.cluster import GPUS, RATE_FLAGS, Machine, cluster_template
from monta_megatron.tools.new.hardware import Gpus, Interfaces

H100 = Machine(
    gpus=Gpus(model="H100 80GB HBM3", number=8, memory_gb=85.5),
    interfaces=Interfaces(
        names=tuple(f"mlx5_{number}:1" for number in range(8)),
        gbit_per_s=400.0,
        source="/sys/class/infiniband",
        others=2,
        network="InfiniBand",
    ),
    num_nodes=16,
)


def test_a_machine_of_h100_is_like_the_preset(tmp_path: Path) -> None:
    template = cluster_template(H100, {}, {})
    assert template.to_fill_in == ()
    path = tmp_path / "cluster.yaml"
    path.write_text(template.text)
    cluster, preset = load_cluster(path), load_cluster("h100_8x_ndr")
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.nics_per_node) == (16, 8, 8)
    assert cluster.memory_gb_per_rank == 85.5
    assert (cluster.links[1:], cluster.launch) == (preset.links[1:], preset.launch)
    assert sorted((each.pair, each.factor) for each in cluster.contention) == sorted(
        (each.pair, each.factor) for each in preset.contention
    )
    # The line rate, 400 Gb/s, is not reached.
    assert cluster.links[0].rate == preset.links[0].rate == Rate(47.0)
    assert "found: 8 x H100 80GB HBM3 (nvidia-smi)" in template.text
    assert "and 2 more" in template.text and "guessed" in template.text
    assert cluster.name == "8 x H100 80GB HBM3, 8 x InfiniBand of 400 Gb/s"


def test_what_is_given_wins() -> None:
    given = {"num_nodes": 2, "name": "mine"}
    template = cluster_template(H100, given, {"inter": Rate(20.0)})
    cluster = strict_yaml.build(Cluster, yaml.safe_load(template.text), "c")
    assert (cluster.name, cluster.num_nodes) == ("mine", 2)
    assert cluster.links[0].rate == Rate(20.0) and template.remarks["num_nodes"] == "given"


def test_a_gpu_of_another_make_is_left_open() -> None:
    pcie = Machine(gpus=Gpus(model="H100 PCIe", number=4, memory_gb=85.5))
    template = cluster_template(pcie, {"num_nodes": 1}, {})
    assert template.to_fill_in == ("links[0].rate", "links[1].rate")
    assert "No figures are known of H100 PCIe" in template.text
    # A rack's node link joins more GPUs than one host has.
    rack = Machine(gpus=Gpus(model="GB200", number=4, memory_gb=198.0))
    template = cluster_template(rack, {"num_nodes": 1}, {})
    assert template.to_fill_in == ("ranks_per_node",)


def test_another_gpu_than_the_one_found() -> None:
    template = cluster_template(H100, {}, {}, gpu="H200")
    cluster = yaml.safe_load(template.text)
    assert template.to_fill_in == ("ranks_per_node",)
    assert cluster["memory_gb_per_rank"] == 141.0 and cluster["name"].startswith("H200, 8 x")
    text = cluster_template(H100, {}, {}, gpu="H100").text
    assert "ranks_per_node: 8\n" in text and "memory_gb_per_rank: 85.5\n" in text


def test_gpus_by_name() -> None:
    assert tuple(sorted(GPUS)) == GPU_NAMES
    flags = {f"--{name}": to for name, (to, _) in CLUSTER_RATES.items() if name != "network-rate"}
    assert flags == {flag: resource for resource, flag in RATE_FLAGS.items()}
    for figures in GPUS.values():
        for link in load_cluster(figures.preset).links:
            # `monta new cluster` takes either part of it.
            assert re.fullmatch(r"alpha: .*; rate: .*", link.source)
