"""Hardware of this machine: GPUs, network interfaces, Slurm's nodes, and its NCCL variables."""

import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

Network: TypeAlias = Literal["InfiniBand", "RoCE", "EFA", "Ethernet"]

SYS = Path("/sys")
ROUTES = Path("/proc/net/route")
LIMIT_S = 30
MIB_BYTES = 2**20
# The vendor of a device of PCI.
AMAZON = "0x1d0f"
# Begins the GID of an IPv4 address.
IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff:"


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of this machine.

    Attributes:
        model: what the driver calls most of them, without the vendor.
        number: how many have that name.
        memory_gb: 1e9 bytes of each; None where the driver does not say.
    """

    model: str
    number: int
    memory_gb: float | None


@dataclass(frozen=True, kw_only=True)
class Interfaces:
    """The fastest network interfaces of this machine.

    Attributes:
        names: of those with the highest rate.
        gbit_per_s: the line rate of each.
        source: where it was read.
        others: how many more are up, slower or of another network.
        network: what they are connected to; "Ethernet" for cards without RDMA.
        gid_index: of the GIDs of RoCE v2 for an IPv4 address, where it is the same on all of them;
            None where it differs, and on other networks.
    """

    names: tuple[str, ...]
    gbit_per_s: float
    source: str
    others: int
    network: Network
    gid_index: int | None = None

    @property
    def kind(self) -> str:
        """Kind of the interfaces."""
        return f"{self.network} of {self.gbit_per_s:g} Gb/s"


def find_gpus() -> Gpus | None:
    """GPUs that nvidia-smi lists; None without it, or without a GPU."""
    query = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [line.rpartition(",") for line in result.stdout.splitlines() if "," in line]
    if result.returncode != 0 or not rows:
        return None
    (name, number), *_ = Counter(name for name, _, _ in rows).most_common(1)
    memory_gb = None
    with suppress(ValueError):
        mib = next(float(mib) for other, _, mib in rows if other == name)
        memory_gb = round(mib * MIB_BYTES / 1e9, 1)
    return Gpus(model=name.strip().removeprefix("NVIDIA "), number=number, memory_gb=memory_gb)


def find_interfaces(sys: Path) -> Interfaces | None:
    """The ports of InfiniBand, RoCE and EFA, or else the network cards; None where none is up.

    Of the ports, those that NCCL_IB_HCA leaves to NCCL.

    Args:
        sys: where the kernel shows them: `SYS`.
    """
    for folder, found in (
        ("class/infiniband", dict(_ports(sys / "class" / "infiniband"))),
        ("class/net", dict(_cards(sys / "class" / "net"))),
    ):
        if found:
            # A few ports of another network may be as fast.
            numbers = Counter((rate, network) for rate, network, _ in found.values())
            rate, network = max(numbers, key=lambda kind: (kind[0], numbers[kind]))
            names = tuple(
                sorted(name for name, kind in found.items() if kind[:2] == (rate, network))
            )
            indices = {found[name][2] for name in names}
            return Interfaces(
                names=names,
                gbit_per_s=rate,
                source=f"/sys/{folder}",
                others=len(found) - len(names),
                network=network,
                gid_index=indices.pop() if len(indices) == 1 else None,
            )
    return None


def nics_of_nodes(nodes: Sequence[int], found: Sequence[tuple[str, int]]) -> int:
    """The network interfaces of a node, which may be several hosts.

    Args:
        nodes: node of every rank.
        found: host of every rank, and how many interfaces that host shows.

    Raises:
        ValueError: it cannot be told, and there are several nodes.
    """
    hosts: dict[int, dict[str, int]] = {}
    for node, (host, number) in zip(nodes, found, strict=True):
        hosts.setdefault(node, {})[host] = number
    numbers = [sum(of_node.values()) for of_node in hosts.values()]
    if len(numbers) == 1:
        return numbers[0] or len(nodes)
    if len({host for host, _ in found}) < sum(map(len, hosts.values())):
        why = "several nodes are on one host"
    elif not min(numbers):
        why = f"node {numbers.index(0)} shows none that is up (/sys/class/infiniband and net)"
    elif len(set(numbers)) > 1:
        why = f"nodes show different numbers, {min(numbers)} to {max(numbers)}"
    else:
        return numbers[0]
    raise ValueError(f"--nics-per-node: not given, must be the interfaces of a node: {why}")


def find_socket_interface(routes: Path) -> str | None:
    """The interface of the default route, by which hosts reach each other; None without one.

    Args:
        routes: where the kernel shows them: `ROUTES`.
    """
    # Interface, destination, gateway, flags, references, uses, metric.
    rows = [line.split() for line in _read(routes).splitlines()[1:]]
    defaults = [(int(row[6]), row[0]) for row in rows if len(row) > 6 and row[1] == "00000000"]
    return min(defaults)[1] if defaults else None


def find_num_nodes() -> int | None:
    """The nodes of the Slurm job that this is in; None outside one."""
    text = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or ""
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _ports(folder: Path) -> Iterator[tuple[str, tuple[float, Network, int | None]]]:
    """Rate, network and GID of ports that are up; "400 Gb/sec (4X NDR)" is a rate."""
    for port in folder.glob("*/ports/*"):
        device = port.parents[1].name
        if "ACTIVE" in _read(port / "state") and _is_left_to_nccl(device, port.name):
            with suppress(ValueError):
                rate = float(_read(port / "rate").partition(" Gb/sec")[0])
                network = _network_of(port)
                gid_index = _gid_index(port) if network == "RoCE" else None
                yield f"{device}:{port.name}", (rate, network, gid_index)


def _is_left_to_nccl(device: str, port: str) -> bool:
    """Whether NCCL_IB_HCA takes a port: by prefixes, or by names behind =; ^ leaves them out."""
    text = os.environ.get("NCCL_IB_HCA", "")
    if not text:
        return True
    names = text.removeprefix("^")
    for name in names.removeprefix("=").split(","):
        wanted, _, wanted_port = name.partition(":")
        is_device = device == wanted if names.startswith("=") else device.startswith(wanted)
        if is_device and wanted_port in ("", port):
            return not text.startswith("^")
    return text.startswith("^")


def _network_of(port: Path) -> Network:
    if _read(port.parents[1] / "device" / "vendor") == AMAZON:
        return "EFA"
    return "RoCE" if _read(port / "link_layer") == "Ethernet" else "InfiniBand"


def _gid_index(port: Path) -> int | None:
    """The first of a port's GIDs of RoCE v2 for an IPv4 address."""
    indices = sorted(int(gid.name) for gid in (port / "gids").glob("*") if gid.name.isdecimal())
    for index in indices:
        is_v2 = _read(port / "gid_attrs" / "types" / str(index)) == "RoCE v2"
        if is_v2 and _read(port / "gids" / str(index)).startswith(IPV4_MAPPED):
            return index
    return None


def _cards(folder: Path) -> Iterator[tuple[str, tuple[float, Network, int | None]]]:
    """Network cards that are up and are no software; their speed is in Mbit/s."""
    for card in folder.glob("*"):
        if (card / "device").exists() and _read(card / "operstate") == "up":
            with suppress(ValueError):
                mbit_per_s = float(_read(card / "speed"))
                # -1 where the driver does not know.
                if mbit_per_s > 0:
                    yield card.name, (mbit_per_s / 1e3, "Ethernet", None)


def _read(file: Path) -> str:
    # A card that is down refuses to tell its speed, and a GID that is not set its type.
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


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


def find_network() -> NetworkEnvironment:
    """The environment for the network of this machine."""
    return network_environment(find_interfaces(SYS), find_socket_interface(ROUTES))


def network_environment(
    interfaces: Interfaces | None, socket_interface: str | None
) -> NetworkEnvironment:
    """The environment for a network.

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
