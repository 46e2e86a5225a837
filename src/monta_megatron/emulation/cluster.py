"""The emulated cluster as data: its settings, names, and uncalibrated costs.

`monta emulate` passes it to every rank in one environment variable, so that a program can find out
what it runs on:

    cluster = EmulatedCluster.from_environment()   # None outside `monta emulate`
    cluster.inter_mbit                             # limit of each node's NIC
    cluster.sent_bytes()                           # by this node's NIC so far
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from monta_megatron.common import files
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.curves import Rate

ENVIRONMENT_VARIABLE = "MONTA_EMULATED_CLUSTER"

# The interface of every node.
NIC = "nic0"


@dataclass(frozen=True, kw_only=True)
class EmulatedCluster:
    """A cluster whose nodes are network namespaces with one NIC each.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: number of ranks per node.
        inter_mbit: rate limit of each NIC, per direction, in Mbit/s.
    """

    nodes: int
    ranks_per_node: int
    inter_mbit: float

    @classmethod
    def from_json(cls, text: str) -> "EmulatedCluster":
        """The inverse of `to_json`."""
        return cls(**json.loads(text))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "EmulatedCluster | None":
        """The cluster that this process runs on, or None outside `monta emulate`."""
        text = environ.get(ENVIRONMENT_VARIABLE)
        return None if text is None else cls.from_json(text)

    def to_json(self) -> str:
        """One line of JSON: an object with the attributes' names as keys."""
        return json.dumps(asdict(self))

    @property
    def node_names(self) -> list[str]:
        """Host names of the nodes, and names of their namespaces."""
        return [f"node{node}" for node in range(self.nodes)]

    def address(self, node: int) -> str:
        """IPv4 address of a node."""
        return f"10.77.{node + 1}.1"

    def sent_bytes(self) -> int:
        """Bytes that the NIC of this process's node has sent so far, headers included."""
        return int(Path(f"/sys/class/net/{NIC}/statistics/tx_bytes").read_text())


PRESET = files.CONFIGS / "clusters" / "emulated_2x4_500mbit.yaml"


def default_costs(emulated: EmulatedCluster) -> Cluster:
    """A guess, good for a first answer and not for a comparison with measured times.

    Without it the planner would take the figures of GPUs, and price a network of a hundred times
    the rate. All but the sizes and the network's rate is as in `PRESET`.
    """
    preset = load_cluster(PRESET)
    assert preset.network is not None and preset.node_link is not None, PRESET
    assert preset.node_link.rate is not None, PRESET
    # The same cores carry both links, so the network is never the faster one for a rank.
    max_rate = preset.node_link.rate.times(emulated.ranks_per_node)
    rate = Rate(min(emulated.inter_mbit / 8e3, max_rate.gbytes_per_s))
    return replace(
        preset,
        name=f"{emulated.nodes} x {emulated.ranks_per_node} emulated at "
        f"{emulated.inter_mbit:g} Mbit/s, not calibrated",
        num_nodes=emulated.nodes,
        ranks_per_node=emulated.ranks_per_node,
        network=replace(preset.network, rate=rate),
    )
