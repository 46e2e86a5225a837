"""A calibrated cluster as text. No torch."""

import textwrap
from collections.abc import Sequence

from monta_megatron.common.quantities import size_text
from monta_megatron.common.tables import table
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import Curve

COLUMNS = (
    *("operation", "resource", ">ranks", ">start us", ">GB/s", ">off by"),
    "measured from, to",
)


def lines(cluster: Cluster) -> list[str]:
    """The curves by their fits, then launch times and contention."""
    launch = cluster.launch
    text = [
        cluster.name,
        "",
        table(COLUMNS, map(cells, cluster.curves)),
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
    fit = curve.fit
    line: Sequence[str | None] = (
        [None] * 3
        if fit is None
        else [f"{fit.alpha_us:.0f}", f"{fit.rate.gbytes_per_s:.3f}", f"{fit.largest_residual:.0%}"]
    )
    ends = f"{size_text(curve.sizes_bytes[0])}, {size_text(curve.sizes_bytes[-1])}"
    return [curve.operation, curve.resource, curve.group_size, *line, ends]


def doubt_lines(cluster: Cluster) -> list[str]:
    """What makes the calibration doubtful; 80 columns wide."""
    indent = " " * len("doubt: ")
    return [
        line
        for doubt in cluster.doubts
        for line in textwrap.wrap(f"doubt: {doubt}", 80, subsequent_indent=indent)
    ]
