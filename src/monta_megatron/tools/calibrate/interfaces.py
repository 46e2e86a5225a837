"""Network interfaces of this machine, as the kernel shows them."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

Network: TypeAlias = Literal["InfiniBand", "RoCE", "EFA", "Ethernet"]

SYS = Path("/sys")
# The vendor of a device of PCI.
AMAZON = "0x1d0f"


def count_interfaces(sys: Path) -> int:
    """The fastest ports of InfiniBand, RoCE and EFA, or else network cards; 0 where none is up.

    Of the ports, those that NCCL_IB_HCA leaves to NCCL.

    Args:
        sys: where the kernel shows them: `SYS`.
    """
    for found in (_ports(sys / "class" / "infiniband"), _cards(sys / "class" / "net")):
        # A few ports of another network may be as fast.
        numbers = Counter(found)
        if numbers:
            return numbers[max(numbers, key=lambda kind: (kind[0], numbers[kind]))]
    return 0


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


def _ports(folder: Path) -> Iterator[tuple[float, Network]]:
    """Rate and network of ports that are up; "400 Gb/sec (4X NDR)" is a rate."""
    for port in folder.glob("*/ports/*"):
        device = port.parents[1].name
        if "ACTIVE" in _read(port / "state") and _is_left_to_nccl(device, port.name):
            with suppress(ValueError):
                yield float(_read(port / "rate").partition(" Gb/sec")[0]), _network_of(port)


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


def _cards(folder: Path) -> Iterator[tuple[float, Network]]:
    """Network cards that are up and are no software; their speed is in Mbit/s."""
    for card in folder.glob("*"):
        if (card / "device").exists() and _read(card / "operstate") == "up":
            with suppress(ValueError):
                mbit_per_s = float(_read(card / "speed"))
                # -1 where the driver does not know.
                if mbit_per_s > 0:
                    yield mbit_per_s / 1e3, "Ethernet"


def _read(file: Path) -> str:
    # A card that is down refuses to tell its speed, and a GID that is not set its type.
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
