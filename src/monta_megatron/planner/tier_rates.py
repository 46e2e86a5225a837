"""The rates by which a cluster prices large messages, for a plan to show."""

from collections.abc import Iterator
from dataclasses import dataclass

from monta_megatron.common.strict_yaml import Text
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import TIERS, Operation, Tier
from monta_megatron.planner.rate import Rate

TIER_NAMES: dict[Tier, str] = {"inter": "network", "intra": "node link", "memory": "memory"}


@dataclass(frozen=True, kw_only=True)
class TierRate:
    """One tier's rate.

    Attributes:
        tier: the tier.
        rate: of the link, or of the curve's largest size where there are curves.
        basis: of what it is the rate, and where it comes from.
    """

    tier: Tier
    rate: Rate
    basis: Text

    def __str__(self) -> str:
        return f"{TIER_NAMES[self.tier]} {self.rate.in_both_units} {self.basis}"


def tier_rates(cluster: Cluster) -> tuple[TierRate, ...]:
    """The rate of every tier that the cluster has."""
    return tuple(_rates(cluster))


def _rates(cluster: Cluster) -> Iterator[TierRate]:
    links = {link.tier: link for link in cluster.links}
    for tier in TIERS if cluster.num_nodes > 1 else TIERS[1:]:
        operation: Operation = "copy" if tier == "memory" else "alltoall"
        curves = [
            each for each in cluster.curves if (each.tier, each.operation) == (tier, operation)
        ]
        if curves:
            curve = max(curves, key=lambda each: each.group_size)
            size = curve.sizes_bytes[-1]
            ranks = f" of {curve.group_size} ranks" if curve.group_size > 1 else ""
            yield TierRate(
                tier=tier,
                rate=Rate(size * 1e-3 / curve.times_us[-1]),
                basis=f"per rank in {operation}{ranks} at {size:,} bytes, {curve.kind}",
            )
        else:
            link = links[tier]
            share = f"per NIC, {cluster.nics_per_node} for {cluster.ranks_per_node} ranks"
            yield TierRate(
                tier=tier,
                rate=link.rate,
                basis=f"{share if tier == 'inter' else 'per rank'}, {link.kind}",
            )
