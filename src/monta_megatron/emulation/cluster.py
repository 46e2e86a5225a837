"""The emulated cluster as data: its settings, measurements, names, and uncalibrated costs.

`monta emulate` passes it to every rank in one environment variable, so that a program can find out
what it runs on:

    cluster = EmulatedCluster.from_environment()   # None outside `monta emulate`
    cluster.measured_inter_gbit_per_s                  # of one NIC
    cluster.sent_bytes()                           # by this node's NICs so far
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from monta_megatron.common.units import Rate
from monta_megatron.planner.cluster import Cluster, HostCosts, Link

ENVIRONMENT_VARIABLE = "MONTA_EMULATED_CLUSTER"

_INTERFACES = Path("/sys/class/net")


@dataclass(frozen=True, kw_only=True)
class EmulatedCluster:
    """A cluster whose nodes are network namespaces.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: number of ranks on each.
        nic_per: whether a node has one NIC, or one for each of its ranks.
        inter_mbit: limit of each NIC, in each direction, in 1e6 bits per second.
        measured_inter_gbit_per_s: rate that one TCP stream reached between two nodes, payload only.
        measured_intra_gbit_per_s: the same inside a node.
    """

    nodes: int
    ranks_per_node: int
    nic_per: Literal["node", "rank"]
    inter_mbit: float
    measured_inter_gbit_per_s: float | None = None
    measured_intra_gbit_per_s: float | None = None

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
    def nics_per_node(self) -> int:
        """Number of NICs of each node."""
        return self.ranks_per_node if self.nic_per == "rank" else 1

    @property
    def node_names(self) -> list[str]:
        """Host names of the nodes, and names of their namespaces."""
        return [f"node{node}" for node in range(self.nodes)]

    @property
    def nic_names(self) -> list[str]:
        """Names of a node's n NICs, the same on every node; local rank r uses NIC r modulo n."""
        return [f"nic{nic}" for nic in range(self.nics_per_node)]

    def address(self, node: int, nic: int = 0) -> str:
        """IPv4 address of a NIC."""
        return f"10.77.{node + 1}.{nic + 1}"

    def sent_bytes(self) -> int:
        """Bytes that the NICs of this process's node have sent so far, headers included."""
        counters = (_INTERFACES / name / "statistics/tx_bytes" for name in self.nic_names)
        return sum(int(counter.read_text()) for counter in counters)


SOURCE = "configs/clusters/emulated_2x4_500mbit.yaml"
INTRA, MEMORY = Rate(0.7), Rate(10.0)


def default_costs(emulated: EmulatedCluster) -> Cluster:
    """A guess, good for a first answer and not for a comparison with measured times.

    Without it the planner would take the figures of GPUs, and price a network of a hundred times
    the rate. All but the network's rate is as in `SOURCE`, which says where each number is from.
    """

    # The same cores carry both links, so the network is never the faster one for a rank.
    most = INTRA.times(emulated.ranks_per_node / emulated.nics_per_node)
    network = Rate(min(emulated.inter_mbit / 8e3, most.gbytes_per_s))
    return Cluster(
        name=f"{emulated.nodes} x {emulated.ranks_per_node} emulated at "
        f"{emulated.inter_mbit:g} Mbit/s, not calibrated",
        num_nodes=emulated.nodes,
        ranks_per_node=emulated.ranks_per_node,
        nics_per_node=emulated.nics_per_node,
        source=SOURCE,
        policy="host",
        network=Link(start_us=1000.0, rate=network, source=SOURCE),
        node_link=Link(start_us=300.0, rate=INTRA, source=SOURCE),
        memory=Link(start_us=10.0, rate=MEMORY, source=SOURCE),
        host=HostCosts(
            collective_us=100.0,
            collective_peer_us=0.0,
            operation_us=0.0,
            counts_to_host_us=0.0,
            counts_us=0.0,
            pass_us=0.0,
            stage_us=0.0,
            source=SOURCE,
        ),
    )
