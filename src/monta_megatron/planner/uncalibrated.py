"""The cluster by which `auto` plans in the absence of measured figures: a preset's."""

import math
from dataclasses import replace
from functools import cache

from monta_megatron.chains.layout import Layout
from monta_megatron.planner.cluster import Cluster

PRESET = "h100_8x_ndr"


@cache
def uncalibrated(layout: Layout) -> Cluster:
    """The preset with the nodes of an exchange; nothing is known of a rank's memory."""
    # A training with a cluster of its own reads no file, and needs nothing that does.
    from monta_megatron.common import presets
    from monta_megatron.planner.cluster_file import load_cluster

    ranks_per_node = math.ceil(len(layout.nodes) / layout.num_nodes)
    return replace(
        load_cluster(presets.FOLDER / "clusters" / f"{PRESET}.yaml"),
        name="an uncalibrated cluster",
        num_nodes=layout.num_nodes,
        ranks_per_node=ranks_per_node,
        nics_per_node=ranks_per_node,
        memory_gb_per_rank=None,
    )
