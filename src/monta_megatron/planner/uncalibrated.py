"""The cluster by which `auto` plans in the absence of measured figures: the nearest preset's."""

import math
import re
from dataclasses import replace
from functools import cache

from monta_megatron.chains.layout import Layout
from monta_megatron.common import presets
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster

# For a GPU of another family than those of the presets.
DEFAULT_GPU = "h100"
# A GPU's family and number, as in "NVIDIA H100 80GB HBM3" and in h100_8x_ndr; not 80GB.
GPU_MODEL = re.compile(r"(?<![a-z0-9])([a-z]+)(\d+)(?![a-z0-9])")
CPU_PRESETS = "emulated"


@cache
def uncalibrated(layout: Layout, gpu: str | None) -> Cluster:
    """The nearest preset with the nodes of an exchange; nothing is known of a rank's memory.

    Args:
        layout: the exchange.
        gpu: what the driver calls a rank's GPU; None on CPU ranks.
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
        gpu: what the driver calls it; None on CPU ranks.
        ranks_per_node: of the exchange.
    """
    names = sorted(path.stem for path in (presets.FOLDER / "clusters").glob("*.yaml"))
    if gpu is None:
        names = [name for name in names if name.startswith(CPU_PRESETS)]
    else:
        of_presets = {name: model for name in names for model in _models(name)[:1]}
        families = {family for family, _ in of_presets.values()}
        models = [model for model in _models(gpu) if model[0] in families]
        family, number = (models or _models(DEFAULT_GPU))[0]
        distances = {
            name: abs(other - number)
            for name, (of_preset, other) in of_presets.items()
            if of_preset == family
        }
        names = [name for name in distances if distances[name] == min(distances.values())]

    words = _words(gpu or "")

    def difference(name: str) -> tuple[int, float]:
        ratio = _load(name).ranks_per_node / ranks_per_node
        return -len(words & _words(name)), abs(math.log(ratio))

    return min(names, key=difference)


def _load(preset: str) -> Cluster:
    return load_cluster(presets.FOLDER / "clusters" / f"{preset}.yaml")


def _words(text: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", text.lower()))


def _models(text: str) -> list[tuple[str, int]]:
    spaced = re.sub("[^a-z0-9]", " ", text.lower())
    return [(family, int(number)) for family, number in GPU_MODEL.findall(spaced)]
