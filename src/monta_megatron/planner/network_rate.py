"""A cluster with another rate of its network or its node link: what-if, or after a change."""

import math
from dataclasses import replace

from monta_megatron.chains.program import Resource
from monta_megatron.common.rules import require
from monta_megatron.planner.chain_price import RESOURCE_NAMES
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import Curve


def with_inter_rate(cluster: Cluster, rate_ratio: float) -> Cluster:
    """A cluster with a network of `rate_ratio` times the rate; see `with_rate`."""
    return with_rate(cluster, "inter", rate_ratio)


def with_rate(cluster: Cluster, resource: Resource, rate_ratio: float) -> Cluster:
    """A cluster with a resource of `rate_ratio` times the rate, and the same start times.

    Raises:
        ValueError: the ratio is not a number above 0.
    """
    holds = rate_ratio > 0 and math.isfinite(rate_ratio)
    require(holds, "rate_ratio", rate_ratio, "be a number > 0")
    return replace(
        cluster,
        name=f"{cluster.name}, {RESOURCE_NAMES[resource]} x {rate_ratio:.3g}",
        # This is what the ratio is for.
        nic_faster_than_800_gbit=True,
        network_faster_than_node_link=True,
        links=tuple(
            link.times(rate_ratio) if link.resource == resource else link for link in cluster.links
        ),
        curves=tuple(
            scaled(curve, rate_ratio) if curve.resource == resource else curve
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
