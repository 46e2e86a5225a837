"""A calibrated cluster as text, and its curves as a picture (the `plot` extra). No torch."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from monta_megatron.calibration.fitting import fit
from monta_megatron.calibration.points import SIZE_FACTOR
from monta_megatron.common import strict_yaml
from monta_megatron.common.files import write_whole
from monta_megatron.common.tables import table
from monta_megatron.common.units import counted, size_text
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import dump_cluster
from monta_megatron.planner.curves import RESOURCE_NAMES, Curve
from monta_megatron.tools import pictures
from monta_megatron.tools.calibrate.record import partial_of

COLUMNS = (
    *("operation", "resource", ">ranks", ">start us", ">GB/s", ">off by"),
    "measured from, to",
)
# As nccl-tests heads them.
NCCL_COLUMNS = (">size (B)", ">time (us)", ">algbw (GB/s)", ">busbw (GB/s)")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Result of `monta calibrate`.

    Attributes:
        cluster: the cluster to write.
        rounds: the fewest samples of any task.
        kept_samples: number of samples that an earlier, killed calibration had taken.
        out: the cluster file.
    """

    cluster: Cluster
    rounds: int
    kept_samples: int
    out: Path

    def save(self) -> None:
        """Write the cluster file, and remove its samples."""
        write_whole(self.out, dump_cluster(self.cluster))
        partial_of(self.out).unlink(missing_ok=True)

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "out": str(self.out),
            "rounds": self.rounds,
            "kept_samples": self.kept_samples,
            "cluster": strict_yaml.plain(self.cluster),
        }

    def text(self) -> str:
        """The curves, and what is in doubt."""
        wrote = f"{counted(self.rounds, 'round')}; wrote {self.out}"
        return "\n".join([*lines(self.cluster), "", wrote, *doubt_lines(self.cluster)])


def lines(cluster: Cluster) -> list[str]:
    """The curves by their fits, AllToAll as nccl-tests shows it, launch times and contention."""
    launch = cluster.host
    text = [
        cluster.name,
        f"{counted(cluster.ranks_per_node, 'rank')} and "
        f"{counted(cluster.nics_per_node, 'network interface')} on each of "
        f"{counted(cluster.num_nodes, 'node')}",
        "",
        table(COLUMNS, map(cells, cluster.curves)),
        "",
        *nccl_lines(cluster),
        "",
        f"host time to start a collective: {launch.collective_us:.0f} us"
        + f" and {launch.collective_peer_us:.2g} for each peer" * (launch.collective_peer_us > 0)
        + "; around the stages of a pass:",
        f"{launch.pass_us:.0f} us, and {launch.counts_us:.0f} us to count and bind for a dispatch",
    ]
    if launch.first_collective_us + launch.first_copy_us + launch.first_find_us > 0:
        text += [
            f"more for the first chunk: {launch.first_collective_us:.0f} us of a collective, "
            f"{launch.first_copy_us:.0f} of a copy,",
            f"{launch.first_find_us:.0f} to find what is copied",
        ]
    return text + [
        f"{first} beside {second}: {cluster.factor(first, second):.2f} and "
        f"{cluster.factor(second, first):.2f} times as long"
        for entry in cluster.contention
        for first, second in [entry.pair]
    ]


def cells(curve: Curve) -> list[object]:
    """The curve under `COLUMNS`."""
    found = fit(curve.sizes_bytes, curve.times_us)
    line: Sequence[str | None] = [None] * 3
    if found is not None:
        rate, residual = f"{found.rate.gbytes_per_s:.3f}", f"{found.largest_residual:.0%}"
        line = [f"{found.alpha_us:.0f}", rate, residual]
    ends = f"{size_text(curve.sizes_bytes[0])}, {size_text(curve.sizes_bytes[-1])}"
    return [curve.operation, curve.resource, curve.group_size, *line, ends]


def nccl_lines(cluster: Cluster) -> list[str]:
    """AllToAll of all ranks by the names of nccl-tests, and on GPUs its command to compare with.

    `size` is what a rank has for all ranks, itself among them, where a curve counts what it sends
    through the link: algbw = size / time, busbw = algbw * (ranks - 1) / ranks.
    """
    ranks, resource = cluster.num_ranks, "intra" if cluster.num_nodes == 1 else "inter"
    peers = ranks - (1 if resource == "intra" else cluster.ranks_per_node)
    curve = next(
        curve
        for curve in cluster.curves
        if (curve.operation, curve.resource, curve.group_size) == ("alltoall", resource, ranks)
    )
    sizes = [num_bytes * ranks // peers for num_bytes in curve.sizes_bytes]
    rows = []
    for size, time_us in zip(sizes, curve.times_us, strict=True):
        algbw = size / time_us / 1e3
        rates = [f"{rate:.2f}" for rate in (algbw, algbw * (ranks - 1) / ranks)]
        rows.append([size, f"{time_us:.1f}", *rates])
    text = [table(NCCL_COLUMNS, rows, f"alltoall of {counted(ranks, 'rank')}")]
    if cluster.policy == "host":
        return text
    on_node = cluster.ranks_per_node
    test = f"alltoall_perf -b {sizes[0]} -e {sizes[-1]} -f {SIZE_FACTOR}"
    if cluster.num_nodes == 1:
        command = f"{test} -g {on_node}"
    else:
        where = f"--nodes {cluster.num_nodes} --ntasks-per-node {on_node}"
        command = f"srun {where} --gpus-per-node {on_node} {test} -g 1"
    return [*text, f"nccl-tests, to compare: {command}"]


def doubt_lines(cluster: Cluster) -> list[str]:
    """Doubts about the calibration; 80 columns wide."""
    indent = " " * len("doubt: ")
    return [
        line
        for doubt in cluster.doubts
        for line in textwrap.wrap(f"doubt: {doubt}", 80, subsequent_indent=indent)
    ]


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
    line = fit(curve.sizes_bytes, curve.times_us)
    if line is not None:
        # A line, drawn on axes of logarithms.
        sizes = np.geomspace(curve.sizes_bytes[0], curve.sizes_bytes[-1], 101)
        times = line.alpha_us + sizes * 1e-3 / line.rate.gbytes_per_s
        axis.plot(sizes, times, "--", linewidth=1, color=points.get_color())
