"""The curves of a cluster as a picture; needs matplotlib (the `plot` extra)."""

from pathlib import Path
from typing import Any

import numpy as np

from monta_megatron.common.units import counted
from monta_megatron.planner.chain_price import RESOURCE_NAMES
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import Curve
from monta_megatron.tools import pictures


def plot_curves(cluster: Cluster, folder: Path) -> Path:
    """Points, and their fits as dashed lines; one panel per resource."""
    resources = [
        resource
        for resource in RESOURCE_NAMES
        if any(curve.resource == resource for curve in cluster.curves)
    ]
    path = folder / "calibration.png"
    with pictures.figure(path, (4.5 * len(resources), 4)) as figure:
        axes = figure.subplots(1, len(resources), squeeze=False)[0]
        for axis, resource in zip(axes, resources, strict=True):
            for curve in cluster.curves:
                if curve.resource == resource:
                    _draw(axis, curve)
            axis.set(
                xscale="log", yscale="log", xlabel="bytes per rank", title=RESOURCE_NAMES[resource]
            )
            axis.grid()
            axis.legend()
        axes[0].set_ylabel("us, slowest rank (dashed: fit)")
        figure.suptitle(cluster.name)
    return path


def _draw(axis: Any, curve: Curve) -> None:
    name: str = curve.operation
    if curve.resource != "memory":
        name = f"{curve.operation}, {counted(curve.group_size, 'rank')}"
    (points,) = axis.plot(curve.sizes_bytes, curve.times_us, "o", markersize=4, label=name)
    if curve.fit is not None:
        # A line, drawn on axes of logarithms.
        sizes = np.geomspace(curve.sizes_bytes[0], curve.sizes_bytes[-1], 101)
        times = curve.fit.alpha_us + sizes * 1e-3 / curve.fit.rate.gbytes_per_s
        axis.plot(sizes, times, "--", linewidth=1, color=points.get_color())
