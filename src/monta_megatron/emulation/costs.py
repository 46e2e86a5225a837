"""What an emulated cluster costs before it is calibrated: from the rate that it was given."""

from monta_megatron.chains.program import Resource
from monta_megatron.common.units import Rate
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.planner.cluster import Cluster, Link
from monta_megatron.planner.curves import HostCosts

SOURCE = "configs/clusters/emulated_2x4_500mbit.yaml"
INTRA, MEMORY = Rate(0.7), Rate(10.0)


def default_costs(emulated: EmulatedCluster) -> Cluster:
    """A guess, good for a first answer and not for a comparison with measured times.

    Without it the planner would take the figures of GPUs, and price a network of a hundred times
    the rate. All but the network's rate is as in `SOURCE`, which says where each number is from.
    """

    def link(resource: Resource, alpha_us: float, rate: Rate) -> Link:
        return Link(
            resource=resource, alpha_us=alpha_us, rate=rate, kind="datasheet", source=SOURCE
        )

    # The same cores carry both links, so the network is never the faster one for a rank.
    most = INTRA.times(emulated.ranks_per_node / emulated.nics_per_node)
    network = Rate(min(emulated.inter_mbit / 8e3, most.gbytes_per_s))
    return Cluster(
        name=f"{emulated.nodes} x {emulated.ranks_per_node} emulated at "
        f"{emulated.inter_mbit:g} Mbit/s, not calibrated",
        num_nodes=emulated.nodes,
        ranks_per_node=emulated.ranks_per_node,
        nics_per_node=emulated.nics_per_node,
        kind="datasheet",
        source=SOURCE,
        copies_block_host=True,
        launch=HostCosts(
            collective_us=100.0,
            operation_us=0.0,
            counts_to_host_us=0.0,
            kind="datasheet",
            source=SOURCE,
        ),
        links=(
            link("inter", 1000.0, network),
            link("intra", 300.0, INTRA),
            link("memory", 10.0, MEMORY),
        ),
    )
