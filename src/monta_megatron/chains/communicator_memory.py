"""The memory of the communicators that are ours, of rails and nodes.

What NCCL allocates is read in its source (2.30, default buffer sizes), by what a stage sends:

    to peers on the node link    for each peer and channel, the buffers of the protocols Simple (4
                                 MiB), LL128 (4.7 MiB) and LL (0.5 MiB), with their headers in whole
                                 pages of 2 MiB on both sides: 12 MiB (src/transport/p2p.cc)
    around a ring, to gather     the same for each channel, since there is one peer
    to peers on the network      for each channel, 16 steps of 128 KiB in each direction, shared by
                                 all peers: 4 MiB (src/transport/net.cc)

A communicator has as many channels as its budget allows; sends and receives use a power of two.
"""

from monta_megatron.chains.chain import Chain
from monta_megatron.chains.layout import DEFAULT_CTAS, OWN_GROUPS, Ctas, Layout
from monta_megatron.chains.stages import AllGather, AllToAll

_NODE_LINK_BYTES = 12 << 20
_NETWORK_BYTES = 4 << 20


def communicator_bytes(chain: Chain, layout: Layout, ctas: Ctas = DEFAULT_CTAS) -> float:
    """Bytes of a rank's memory that the rail and node communicators of a chain take.

    Args:
        chain: the chain; 0 for one that cannot run on the layout.
        layout: the rank's place.
        ctas: the budgets of the communicators.
    """
    if chain.incompatibility(layout) is not None:
        return 0.0
    total = 0.0
    for stage in chain.stages:
        if not isinstance(stage, AllToAll | AllGather) or stage.group not in OWN_GROUPS:
            continue
        budget = ctas.rail if stage.group == "rail" else ctas.node
        # The power of two that is not below it.
        channels = 1 << (budget - 1).bit_length()
        num_peers = len(layout.members(stage.group, layout.rank)) - 1
        if num_peers == 0:
            continue
        if stage.group in layout.crossing_groups:
            total += channels * _NETWORK_BYTES
        else:
            total += channels * num_peers * _NODE_LINK_BYTES
        if isinstance(stage, AllGather):
            # Transposed it is an AllToAll, counted above.
            total += budget * _NODE_LINK_BYTES
    return total
