"""The rates by which a cluster prices large messages, for a plan to show."""

from collections.abc import Iterator
from dataclasses import dataclass

from monta_megatron.chains.program import Resource
from monta_megatron.common.rules import Text
from monta_megatron.common.units import Rate
from monta_megatron.planner.chain_price import RESOURCE_NAMES
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import RESOURCES, Operation


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
    for resource in RESOURCES if cluster.num_nodes > 1 else RESOURCES[1:]:
        operation: Operation = "copy" if resource == "memory" else "alltoall"
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
