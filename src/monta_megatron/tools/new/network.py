"""NCCL's environment for a network: variables that are known, and those that are left to the user.

Variables and values follow NCCL's documentation of its environment and, for EFA, the settings that
AWS recommends for libfabric >= 1.18 and aws-ofi-nccl >= 1.7.
"""

from dataclasses import dataclass, field

from monta_megatron.tools.new.hardware import Interfaces

# How a value is found or checked, and what it is for.
SOCKET = "`ip -o -4 route show default`: the interface by which hosts reach each other"
PORTS = "`ibdev2netdev`, `ibstat`: the ports of the exchange, =mlx5_0:1,mlx5_1:1"
GID_INDEX = (
    "`show_gids`: the row of RoCE v2 with an IPv4 address, if it is the same on all ports; NCCL >= "
    "2.21 finds it for each"
)
TRAFFIC_CLASS = (
    "`mlnx_qos -i INTERFACE`: 4 times the DSCP of the priority with PFC, as the switches are set; "
    "without it NCCL sends with 0, which they may drop"
)
PROVIDER = "efa (`fi_info -p efa`): libfabric then takes no other provider"
HUGE_PAGES = "0: data loaders fork, which fails when huge pages run out"
DEVICE_RDMA = "1, before libfabric 1.18 or aws-ofi-nccl 1.7 only"


@dataclass(frozen=True, kw_only=True)
class NetworkEnvironment:
    """Environment variables of every rank.

    Attributes:
        values: those that are known.
        remarks: comments on them.
        proposed: those that are not known -> how they are found.
    """

    values: dict[str, str | int] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    proposed: dict[str, str] = field(default_factory=dict)


def network_environment(
    interfaces: Interfaces | None, socket_interface: str | None
) -> NetworkEnvironment:
    """The environment for the network of this machine.

    On InfiniBand NCCL needs none; where other ports are up, the fastest are named. Where this
    machine has no ports with RDMA, as a login node, all that RoCE and EFA need is proposed.

    Args:
        interfaces: the fastest of this machine; None where none is up.
        socket_interface: of its default route; None without one.
    """
    found = None if interfaces is None or interfaces.network == "Ethernet" else interfaces
    ports = None if found is None else f"={','.join(found.names)}"
    names_ports = found is not None and found.network == "InfiniBand" and found.others > 0
    rows: tuple[tuple[str, str, str | int | None, str], ...] = (
        ("NCCL_SOCKET_IFNAME", "RoCE and EFA", socket_interface and f"={socket_interface}", SOCKET),
        ("NCCL_IB_HCA", "InfiniBand" if names_ports else "RoCE", ports, PORTS),
        ("NCCL_IB_GID_INDEX", "RoCE", None if found is None else found.gid_index, GID_INDEX),
        ("NCCL_IB_TC", "RoCE", None, TRAFFIC_CLASS),
        ("FI_PROVIDER", "EFA", "efa", PROVIDER),
        ("FI_EFA_USE_HUGE_PAGE", "EFA", 0, HUGE_PAGES),
        ("FI_EFA_USE_DEVICE_RDMA", "EFA", None, DEVICE_RDMA),
    )
    environment = NetworkEnvironment()
    for name, networks, value, how in rows:
        if found is None:
            environment.proposed[name] = f"{networks} only. {how}"
        elif found.network in networks:
            if value is None:
                environment.proposed[name] = how
            else:
                environment.values[name] = value
                environment.remarks[name] = f"{found.kind}, found on this machine; {how}"
    return environment
