"""Cluster files, the nearest preset for uncalibrated clusters, and changed rates."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from monta_megatron.chains.program import PricedOperation, Resource
from monta_megatron.common import presets, strict_yaml
from monta_megatron.common.rules import Text, require
from monta_megatron.common.units import Rate
from monta_megatron.core import Layout
from monta_megatron.planner.chain_price import RESOURCE_NAMES
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import Curve


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file, or the preset of that name.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    path = presets.find("clusters", path)
    cluster = strict_yaml.load(Cluster, path)
    try:
        cluster.check_network()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return cluster


def dump_measured(cluster: Cluster) -> str:
    """A calibrated cluster as the text of its file."""
    return strict_yaml.dump(strict_yaml.plain(cluster))


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


def with_inter_rate(cluster: Cluster, rate_ratio: float) -> Cluster:
    """A cluster with a network of `rate_ratio` times the rate, and the same start times.

    Raises:
        ValueError: the ratio is not a number above 0.
    """
    holds = rate_ratio > 0 and math.isfinite(rate_ratio)
    require(holds, "rate_ratio", rate_ratio, "be a number > 0")
    return replace(
        cluster,
        name=f"{cluster.name}, {RESOURCE_NAMES['inter']} x {rate_ratio:.3g}",
        links=tuple(
            link.times(rate_ratio) if link.resource == "inter" else link for link in cluster.links
        ),
        curves=tuple(
            scaled(curve, rate_ratio) if curve.resource == "inter" else curve
            for curve in cluster.curves
        ),
    )


def scaled(curve: Curve, rate_ratio: float) -> Curve:
    """A curve where a byte takes `1 / rate_ratio` of its time on the link.

    The part of a size's time that exceeds its bytes at the curve's last slope stays as it is.
    Starting overlaps most of the transfer, so it is not added; instead, no size becomes faster
    than starting alone, or than it was if that is faster still.
    """
    start_us, us_per_byte = curve.time_us(0.0), curve.slopes[1]
    times = []
    for size, time in zip(curve.sizes_bytes, curve.times_us, strict=True):
        link_us = min(size * us_per_byte, time)
        times.append(max(time - link_us + link_us / rate_ratio, min(start_us, time)))
    return replace(
        curve,
        times_us=tuple(times),
        source=f"{curve.source}; scaled to {rate_ratio:g} of the measured rate",
        fit=None,
    )


@dataclass(frozen=True, kw_only=True)
class ResourceRate:
    """The rate of one resource.

    Attributes:
        resource: the resource.
        rate: of the link, or of the curve's largest size where there are curves.
        basis: of what it is the rate, and where it comes from.
    """

    resource: Resource
    rate: Rate
    basis: Text

    def __str__(self) -> str:
        return f"{RESOURCE_NAMES[self.resource]} {self.rate.in_both_units} {self.basis}"


def resource_rates(cluster: Cluster) -> tuple[ResourceRate, ...]:
    """The rate of every resource that the cluster has."""
    return tuple(_rates(cluster))


def _rates(cluster: Cluster) -> Iterator[ResourceRate]:
    links = {link.resource: link for link in cluster.links}
    for resource in cluster.resources:
        operation: PricedOperation = "copy" if resource == "memory" else "alltoall"
        curves = [
            curve
            for curve in cluster.curves
            if (curve.resource, curve.operation) == (resource, operation)
        ]
        if curves:
            curve = max(curves, key=lambda curve: curve.group_size)
            size = curve.sizes_bytes[-1]
            ranks = f" of {curve.group_size} ranks" if curve.group_size > 1 else ""
            yield ResourceRate(
                resource=resource,
                rate=Rate(size * 1e-3 / curve.times_us[-1]),
                basis=f"per rank in {operation}{ranks} at {size:,} bytes, {curve.kind}",
            )
        else:
            link = links[resource]
            share = f"per NIC, {cluster.nics_per_node} for {cluster.ranks_per_node} ranks"
            if link.cross_rail_rate is not None:
                share += f", {link.cross_rail_rate} across rails"
            yield ResourceRate(
                resource=resource,
                rate=link.rate,
                basis=f"{share if resource == 'inter' else 'per rank'}, {link.kind}",
            )
