"""The network of an emulated cluster: namespaces, virtual NICs, a switch, and their rates.

    node 0           switch (a bridge)           node 1
    nic0 = veth = node0port ---+--- node1port = veth = nic0
      tbf: sends at most R     |    tbf: node 1 receives at most R

Both ends of every pair are shaped, so that a node neither sends nor receives faster than its NIC,
however many peers send to it at once. Ranks of a node reach each other by the same address, but
over the namespace's own stack (the kernel sends what is addressed to itself through `lo`).

The network is built inside network and mount namespaces (emulator.py) and ends with them.
"""

import subprocess
from pathlib import Path

from monta_megatron.emulation.cluster import NIC, EmulatedCluster

# A tmpfs that only this emulation sees. `ip netns` keeps its names here, and we keep our files.
PRIVATE_DIRECTORY = Path("/run/netns")

# Jumbo frames, which cost less CPU time per byte.
_MTU_BYTES = 9000
# Burst after a pause, as time on the link. The longer, the more of a small message
# is free; the shorter, the more often a timer has to fire (CPU time), tens of microseconds late.
# With 250 us a message of 100 kB takes at least 0.8 of its time on the link at 1 Gbit/s, 0.9 at
# lower rates, and a stream reaches 99% of the setting from 10 Mbit/s to 20 Gbit/s.
_BURST_SECONDS = 250e-6
_MIN_BURST_BYTES = 10_000  # one frame
_MAX_SEGMENT_BYTES = 64 * 1024  # the kernel's own
# Ports drop nothing, as fabrics hardly do: TCP's windows limit what waits in one.
_QUEUE_BYTES = 10**9

_KERNEL_NEEDS = "the kernel has to have veth, bridge and sch_tbf (modprobe veth bridge sch_tbf)"

_SETTINGS = {
    # Compiled into every kernel, allowed in every namespace, and the same on every host.
    "net/ipv4/tcp_congestion_control": "reno",
    # At most 1 MiB of each connection in flight (half of the last value), on any host.
    "net/ipv4/tcp_rmem": "4096 131072 2097152",
    # A connection does not fall back to slow start while a program computes.
    "net/ipv4/tcp_slow_start_after_idle": "0",
}
# Absent where the kernel has no IPv6. Router solicitations would count as bytes sent.
_NO_IPV6 = "net/ipv6/conf/all/disable_ipv6"
_APPLY_SETTINGS = " && ".join(
    [
        *(f"echo {value} >/proc/sys/{name}" for name, value in _SETTINGS.items()),
        f"[ ! -e /proc/sys/{_NO_IPV6} ] || echo 1 >/proc/sys/{_NO_IPV6}",
    ]
)


def build(cluster: EmulatedCluster) -> None:
    """Make the cluster's network in the current network and mount namespaces.

    Raises:
        ValueError: something is missing here; says what.
    """
    _make_private_directory()
    _name_hosts(cluster)
    _run("ip", "link", "add", "switch", "type", "bridge")
    _run("ip", "link", "set", "switch", "up")
    end = ["mtu", _MTU_BYTES, "gso_max_size", min(_burst_bytes(cluster), _MAX_SEGMENT_BYTES)]
    for node, name in enumerate(cluster.node_names):
        port, in_netns = f"{name}port", ["-netns", name]
        _run("ip", "netns", "add", name)
        peer = ["peer", "name", NIC, *end, "netns", name]
        _run("ip", "link", "add", port, *end, "type", "veth", *peer)
        _run("ip", "link", "set", port, "master", "switch", "up")
        _run(*in_node(name), "sh", "-c", _APPLY_SETTINGS)
        _run("ip", *in_netns, "link", "set", "lo", "up")
        _run("ip", *in_netns, "address", "add", f"{cluster.address(node)}/16", "dev", NIC)
        _run("ip", *in_netns, "link", "set", NIC, "up")
        _run("tc", *_limit(cluster, port))
        _run("tc", *in_netns, *_limit(cluster, NIC))


def in_node(name: str) -> list[str]:
    """The words to put in front of a command so that it runs in a node's network."""
    return ["ip", "netns", "exec", name]


def _make_private_directory() -> None:
    try:
        PRIVATE_DIRECTORY.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "monta", str(PRIVATE_DIRECTORY))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{PRIVATE_DIRECTORY}, where `ip netns` keeps its names, cannot be mounted ({error}): "
            f"make it once as root (mkdir {PRIVATE_DIRECTORY}), or run as root"
        ) from None


def _name_hosts(cluster: EmulatedCluster) -> None:
    """Let every node resolve the nodes' names: there is no other name service inside."""
    hosts = Path("/etc/hosts")
    if not hosts.exists():
        return
    # The second form is what torch's TCPStore, which listens on IPv6, asks for.
    lines = [
        f"{prefix}{cluster.address(node)} {name}\n"
        for node, name in enumerate(cluster.node_names)
        for prefix in ("", "::ffff:")
    ]
    ours = PRIVATE_DIRECTORY / ".hosts"
    ours.write_text("".join(lines) + hosts.read_text())
    _run("mount", "--bind", str(ours), str(hosts))


def _limit(cluster: EmulatedCluster, interface: str) -> list[object]:
    """The words of `tc` that limit the outgoing rate of an interface."""
    rate = ["rate", f"{round(cluster.inter_mbit * 1e6)}bit", "burst", _burst_bytes(cluster)]
    return ["qdisc", "add", "dev", interface, "root", "tbf", *rate, "limit", _QUEUE_BYTES]


def _burst_bytes(cluster: EmulatedCluster) -> int:
    return max(_MIN_BURST_BYTES, round(cluster.inter_mbit * 1e6 / 8 * _BURST_SECONDS))


def _run(*words: object) -> None:
    command = list(map(str, words))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = "; ".join(done.stderr.strip().splitlines())
        needs = "" if command[0] == "mount" else f"; {_KERNEL_NEEDS}"
        raise ValueError(f"`{' '.join(command)}` failed: {said}{needs}")
