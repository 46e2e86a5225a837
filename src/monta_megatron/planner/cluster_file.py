"""Cluster files, and the nearest preset for a cluster without one.

A file is a page that a person edits: names and sizes, then published figures, a key for each
resource. A rate is a text with its unit, in one direction; `range` holds what was published, `rate`
is the likely one.

    name: H100, 8x InfiniBand NDR
    source: DGX H100, 8 GPUs and 8 NICs per node; 80 GB, nvidia-h100-datasheet
    num_nodes: 512
    ranks_per_node: 8
    nics_per_node: 8
    memory_gb_per_rank: 80
    network: {rate: 47 GB/s, range: [46 GB/s, 49 GB/s], start_us: 30, source: nccl-tests issue 290}
    node_link: {curves: H100-80GB-HBM3, source: NCCL's times by size, clusters/curves}
    memory: {rate: 2475 GB/s, start_us: 2.9, source: nccl issue 1264}
    host: {speed: 1.25, range: [0.5, 1.9], source: docs/calibration.md}

A calibration writes what it measured as rows in place of the figures: `curves` (operation,
resource, ranks, then bytes that leave a rank:us) and `contention` (a resource, another, and by how
much the second slows the first).

    policy: host
    host: {collective_us: 525.7, operation_us: 0, counts_us: 3370.7, ..., source: monta calibrate}
    curves:
    - alltoall network 8 5120:6106 20480:6584 81920:8344
    - copy memory 1 20480:12 81920:30
    contention: [[network, memory, 1.1], [memory, network, 1.6]]

`cluster.Cluster` and its parts say what each key means.
"""

import math
import re
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from monta_megatron.common import files, strict_yaml
from monta_megatron.common.rules import require
from monta_megatron.core import Layout
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import Rate

# 800 Gb/s, the rate of the newest interfaces.
MAX_NIC_RATE = Rate(100.0)


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file, or the preset of that name.

    Raises:
        UserError: one line that names the file, the key, the value and the rule.
    """
    path = files.find_config("clusters", path)
    cluster = strict_yaml.load(Cluster, path)
    rate = None if cluster.network is None else cluster.network.rate
    if rate is not None:
        rule = f"be at most {MAX_NIC_RATE.in_both_units} each; check bits and bytes"
        holds = rate.gbytes_per_s <= MAX_NIC_RATE.gbytes_per_s
        require(holds, f"{path}: network.rate", rate.in_both_units, rule)
    return cluster


def dump_cluster(cluster: Cluster) -> str:
    """A cluster as the text of its file, without what has its default; a row is a line."""
    lines = []
    for name, value in _without_defaults(cluster).items():
        if name == "curves":
            lines += [f"{name}:", *(f"- {_in_line(row)}" for row in value)]
        else:
            lines.append(f"{name}: {_in_line(value)}")
    return "\n".join(lines) + "\n"


def _without_defaults(value: Any) -> Any:
    """A dataclass as plain data, without what has its default."""
    if not is_dataclass(value) or isinstance(value, Rate):
        return strict_yaml.plain(value)
    values = ((entry, getattr(value, entry.name)) for entry in fields(value))
    return {entry.name: _without_defaults(part) for entry, part in values if part != entry.default}


def _in_line(value: object) -> str:
    """Plain data as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
    return text.removesuffix("...\n").strip()


# For a GPU of another family than those of the presets.
DEFAULT_GPU = "h", 100
# A GPU's family and number, as in "NVIDIA H100 80GB HBM3" and in h100_8x_ndr; not 80GB.
GPU_MODEL = re.compile(r"(?<![a-z0-9])([a-z]+)(\d+)(?![a-z0-9])")


@cache
def uncalibrated(layout: Layout, gpu: str | None) -> Cluster:
    """The nearest preset with the nodes of an exchange; nothing is known of a rank's memory.

    Args:
        layout: layout of the exchange.
        gpu: the driver's name of a rank's GPU; None on CPU ranks.
    """
    ranks_per_node = math.ceil(len(layout.nodes) / layout.num_nodes)
    preset = nearest_preset(gpu, ranks_per_node)
    cluster = _load(preset)
    return replace(
        cluster,
        name=f"an uncalibrated cluster (preset {preset}, nearest to {gpu or 'CPU ranks'}, "
        f"{ranks_per_node} per node)",
        num_nodes=layout.num_nodes,
        ranks_per_node=ranks_per_node,
        nics_per_node=math.ceil(ranks_per_node * cluster.nics_per_node / cluster.ranks_per_node),
        memory_gb_per_rank=None,
    )


def nearest_preset(gpu: str | None, ranks_per_node: int) -> str:
    """The preset with the same GPU, else the nearest one of its family; of those by ranks per node.

    Hand-worked: an H200 is of the family H, in which 100 is nearer to 200 than 800 is. Of presets
    with one GPU the one that says more of its name comes first: A100-PCIE-40GB, a100_pcie_hdr.

    Args:
        gpu: the driver's name of the GPU; None on CPU ranks.
        ranks_per_node: ranks of the exchange on one node.
    """
    names = sorted(path.stem for path in (files.CONFIGS / "clusters").glob("*.yaml"))
    # CPU ranks, and the presets of an emulated cluster, have no model.
    models = {name: next(iter(_models(name)), ("", 0)) for name in names}
    known = {family for family, _ in models.values()}
    default = DEFAULT_GPU if gpu else ("", 0)
    candidates = (model for model in _models(gpu or "") if model[0] in known)
    family, number = next(candidates, default)

    def difference(name: str) -> tuple[bool, int, int, float]:
        preset_family, preset_number = models[name]
        shared = set(_spaced(name).split()) & set(_spaced(gpu or "").split())
        ratio = _load(name).ranks_per_node / ranks_per_node
        distance = abs(preset_number - number)
        return preset_family != family, distance, -len(shared), abs(math.log(ratio))

    return min(names, key=difference)


def _load(preset: str) -> Cluster:
    return load_cluster(files.CONFIGS / "clusters" / f"{preset}.yaml")


def _spaced(text: str) -> str:
    return re.sub("[^a-z0-9]", " ", text.lower())


def _models(text: str) -> list[tuple[str, int]]:
    return [(family, int(number)) for family, number in GPU_MODEL.findall(_spaced(text))]
