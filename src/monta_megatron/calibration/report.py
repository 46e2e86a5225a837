"""A calibrated cluster as text. No torch."""

import textwrap

from monta_megatron.planner.cluster import Cluster


def lines(cluster: Cluster) -> list[str]:
    """The curves by their fits, then launch times and contention; 80 columns wide."""
    text = [
        cluster.name,
        "",
        f"{'operation':<10} {'tier':<7} {'ranks':>5} {'start us':>9} {'GB/s':>8} {'off by':>7}  "
        f"{'measured from, to':<20}",
    ]
    for curve in cluster.curves:
        name = f"{curve.operation:<10} {curve.tier:<7} {curve.group_size:>5}"
        ends = f"{_size(curve.sizes_bytes[0])}, {_size(curve.sizes_bytes[-1])}"
        if curve.fit is None:
            text.append(f"{name} {'-':>9} {'-':>8} {'-':>7}  {ends}")
            continue
        text.append(
            f"{name} {curve.fit.alpha_us:>9.0f} {curve.fit.rate.gbytes_per_s:>8.3f} "
            f"{curve.fit.largest_residual:>7.0%}  {ends}"
        )
    launch = cluster.launch
    text += [
        "",
        f"host time to start a collective: {launch.collective_us:.0f} us; around the stages of a "
        "walk:",
        f"{launch.walk_us:.0f} us, and {launch.counts_us:.0f} us to count and bind for a dispatch",
    ]
    if launch.first_collective_us + launch.first_copy_us + launch.first_find_us > 0:
        text.append(
            f"more for the first chunk: {launch.first_collective_us:.0f} us of a collective, "
            f"{launch.first_copy_us:.0f} of a copy,"
        )
        text.append(f"{launch.first_find_us:.0f} to find what is copied")
    text += [
        f"{first} beside {second}: {cluster.factor(first, second):.2f} and "
        f"{cluster.factor(second, first):.2f} times as long"
        for entry in cluster.contention
        for first, second in [entry.pair]
    ]
    return text


def doubt_lines(cluster: Cluster) -> list[str]:
    """What the calibration found wanting in itself; 80 columns wide."""
    indent = " " * len("doubt: ")
    return [
        line
        for doubt in cluster.doubts
        for line in textwrap.wrap(f"doubt: {doubt}", 80, subsequent_indent=indent)
    ]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"
