"""A common cluster, by which `auto` plans in the absence of measured figures."""

import math
from dataclasses import replace
from functools import cache

from monta_megatron.chains.layout import Layout
from monta_megatron.planner.cluster import Cluster, Contention, HostCosts, Link
from monta_megatron.planner.rate import Rate

# The figures of this preset, which says where each was published; they are written here so that a
# training reads no file that its user has not named. tests/unit/test_presets.py compares the two.
PRESET = "h100_8x_ndr"
COMMON = Cluster(
    name="an uncalibrated cluster",
    num_nodes=512,
    ranks_per_node=8,
    nics_per_node=8,
    kind="datasheet",
    source=PRESET,
    launch=HostCosts(
        collective_us=11.4,
        copy_us=7.6,
        sum_us=7.6,
        find_us=68.4,
        counts_to_host_us=15.2,
        kind="datasheet",
        source=PRESET,
    ),
    links=(
        Link(resource="inter", alpha_us=30.0, rate=Rate(47.0), kind="datasheet", source=PRESET),
        Link(resource="intra", alpha_us=10.8, rate=Rate(335.0), kind="datasheet", source=PRESET),
        Link(resource="memory", alpha_us=2.9, rate=Rate(3350.0), kind="datasheet", source=PRESET),
    ),
    contention=(
        Contention(pair=("intra", "memory"), factor=1.25, kind="datasheet", source=PRESET),
    ),
)


@cache
def uncalibrated(layout: Layout) -> Cluster:
    """The common cluster with the nodes of an exchange; nothing is known of a rank's memory."""
    ranks_per_node = math.ceil(len(layout.nodes) / layout.num_nodes)
    return replace(
        COMMON,
        num_nodes=layout.num_nodes,
        ranks_per_node=ranks_per_node,
        nics_per_node=ranks_per_node,
    )
