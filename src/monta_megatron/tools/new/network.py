"""The environment that NCCL needs on a network: what was found, and what is left to the user.

Variables and values: NCCL's documentation of its environment; for EFA the settings that AWS
recommends for libfabric >= 1.18 and aws-ofi-nccl >= 1.7.
"""

from dataclasses import dataclass, field

from monta_megatron.tools.new.hardware import Interfaces

SOCKET = "`ip -o -4 route show default` on a node: the interface by which hosts reach each other"
TRAFFIC_CLASS = (
    "`mlnx_qos -i INTERFACE`: 4 times the DSCP of the priority that has PFC, as the switches are "
    "set; without it NCCL sends with 0, which they may drop"
)
GID_INDEX = (
    "`show_gids`: the row of RoCE v2 with an IPv4 address, where it is the same on all ports; NCCL "
    "< 2.21 needs it, later ones find each port's"
)
HCA = "`ibdev2netdev` or `ibstat`: the ports of the exchange, =mlx5_0:1,mlx5_1:1"
HUGE_PAGES = "0: data loaders fork, which fails when huge pages run out"
DEVICE_RDMA = "1: before libfabric 1.18 or aws-ofi-nccl 1.7 only"
PROVIDER = "efa: libfabric takes no other provider, or fails (`fi_info -p efa`)"


@dataclass(frozen=True, kw_only=True)
class NetworkEnvironment:
    """Variables of every rank.

    Attributes:
        values: those that are known.
        remarks: likewise -> where the value comes from.
        proposed: those that are not known -> how they are found.
    """

    values: dict[str, str | int] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    proposed: dict[str, str] = field(default_factory=dict)


def network_environment(
    interfaces: Interfaces | None, socket_interface: str | None
) -> NetworkEnvironment:
    """The environment for the network of this machine.

    On InfiniBand NCCL finds all by itself; where slower ports are up, the fastest are named. Where
    this machine has no ports with RDMA, as a login node, all that RoCE and EFA need is proposed.

    Args:
        interfaces: the fastest of this machine; None where none is up.
        socket_interface: of its default route; None without one.
    """
    values: dict[str, str | int] = {}
    remarks: dict[str, str] = {}
    proposed: dict[str, str] = {}
    network = None if interfaces is None else interfaces.network
    has_ports = interfaces is not None and network != "Ethernet"

    def add(name: str, value: str | int | None, remark: str, how: str) -> None:
        if value is None or not has_ports:
            proposed[name] = how
        else:
            values[name], remarks[name] = value, remark

    if network == "InfiniBand":
        assert interfaces is not None
        if interfaces.slower:
            add("NCCL_IB_HCA", _ports(interfaces), f"found: {interfaces.kind}", HCA)
        return NetworkEnvironment(values=values, remarks=remarks)
    found = "found on this machine; the nodes of the job have to have the same"
    name = None if socket_interface is None else f"={socket_interface}"
    how = f"RoCE and EFA; InfiniBand needs none of these. {SOCKET}"
    add("NCCL_SOCKET_IFNAME", name, f"{found} (default route)", how)
    if network != "EFA":
        ports = None if interfaces is None else _ports(interfaces)
        gid_index = None if interfaces is None else interfaces.gid_index
        kind = "" if interfaces is None else interfaces.kind
        add("NCCL_IB_HCA", ports, f"{found}: {kind}", f"RoCE. {HCA}")
        add("NCCL_IB_GID_INDEX", gid_index, f"{found}: RoCE v2, IPv4", f"RoCE. {GID_INDEX}")
        proposed["NCCL_IB_TC"] = f"RoCE. {TRAFFIC_CLASS}"
    if network != "RoCE":
        add("FI_PROVIDER", "efa", PROVIDER, f"EFA. {PROVIDER}")
        add("FI_EFA_USE_HUGE_PAGE", 0, HUGE_PAGES, f"EFA. {HUGE_PAGES}")
        proposed["FI_EFA_USE_DEVICE_RDMA"] = f"EFA. {DEVICE_RDMA}"
    return NetworkEnvironment(values=values, remarks=remarks, proposed=proposed)


def _ports(interfaces: Interfaces) -> str:
    """The list of NCCL_IB_HCA; = stands for names that are whole."""
    return f"={','.join(interfaces.names)}"
