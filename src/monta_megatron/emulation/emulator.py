"""Builds an emulated cluster's network, then runs a command on it, once per rank.

Runs as the first process of a sandbox, with network, mount and process namespaces of its own:

    python -m monta_megatron.emulation.emulator [--json] CLUSTER_JSON SCRIPT_OR_MODULE...

Names under /run/netns, interfaces, bridges and mounts are visible to it alone, need no unique
names, and are removed by the kernel when it ends, with every process that it started. That holds
after a failure or a signal as well as after an ordinary end, so nothing has to be cleaned up. Its
standard input is a lifeline: it ends when the caller does, even by SIGKILL, and the sandbox then
ends as well.

    node 0           switch (a bridge)           node 1
    nic0 = veth = node0port ---+--- node1port = veth = nic0
      tbf: sends at most R     |    tbf: node 1 receives at most R

Both ends of every pair are shaped, so that a node neither sends nor receives faster than its NIC,
however many peers send to it at once. Ranks of a node reach each other by the same address, but
over the namespace's own stack (the kernel sends what is addressed to itself through `lo`).

Ranks get torchrun's variables. Rank 0's standard output passes through untouched; everything else
goes to standard error, line by line, labelled with the node and rank that it comes from. With
--json the document is the only thing on standard output, and rank 0's output is treated like that
of the others. Where a rank fails, the last line says which was the first, and why.
"""

import dataclasses
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from monta_megatron.common.errors import UserError
from monta_megatron.common.text import counted, tell
from monta_megatron.common.torchrun import cause_of, ended
from monta_megatron.emulation.cluster import (
    ENVIRONMENT_VARIABLE,
    NIC,
    EmulatedCluster,
    default_costs,
)
from monta_megatron.planner.cluster_file import dump_cluster

# Folders with commands that may be missing from the PATH of a user who is not root.
_SYSTEM_PATHS = "/usr/local/sbin:/usr/sbin:/sbin"

_ADVICE = (
    "run as root, in a container with --privileged, or allow user namespaces (sysctl "
    "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
)

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "util-linux"}


def run(command: Sequence[str]) -> int:
    """Run a command in private namespaces; returns its exit status, or 128 + n for signal n.

    SIGINT and SIGTERM end everything inside before this returns.

    Raises:
        UserError: the namespaces cannot be made here.
    """
    unshare = unshare_command()
    standard_input, lifeline = os.pipe()
    interrupts: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        if not interrupts:
            os.close(lifeline)
        interrupts.append(number)

    # Set for SIGINT too: a shell starts background jobs with SIGINT ignored.
    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    # A session of its own: Ctrl-C reaches only this process, which ends what is inside in order.
    status = subprocess.call(
        [*unshare, *command], env=_environ(), stdin=standard_input, start_new_session=True
    )
    for number, handler in before.items():
        signal.signal(number, handler)
    if interrupts:
        tell("emulate", "interrupted; every rank has ended")
        return 128 + interrupts[0]
    return status if status >= 0 else 128 - status


def unshare_command() -> list[str]:
    """The words to put in front of a command to run it in private namespaces.

    Raises:
        UserError: they cannot be made here; says what is missing and how to get it.
    """
    environ = _environ()
    for name, package in _PACKAGES.items():
        if shutil.which(name, path=environ["PATH"]) is None:
            raise UserError(
                f"`{name}` not found: install {package} (apt install {package}, or dnf, or apk)"
            )
    unshare = ["unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
    if os.geteuid() != 0:
        unshare += ["--user", "--map-root-user"]
    trial = subprocess.run(
        [*unshare, "true"], env=environ, capture_output=True, text=True, start_new_session=True
    )
    if trial.returncode != 0:
        said = "; ".join(trial.stderr.strip().splitlines())
        raise UserError(f"private namespaces cannot be made ({said}): {_ADVICE}")
    return unshare


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATHS}"}


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


def build_network(cluster: EmulatedCluster) -> None:
    """Make the cluster's network in the current network and mount namespaces.

    Raises:
        UserError: something is missing here; says what.
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
    except (OSError, UserError) as error:
        raise UserError(
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
        raise UserError(f"`{' '.join(command)}` failed: {said}{needs}")


# After one rank has failed, the others get this long to fail too and to report why.
_GRACE_SECONDS = 5.0
# The longest wait for output of processes that outlive their rank.
_LAST_WORDS_SECONDS = 2.0
# Of each rank, to tell why it failed: a traceback, and what a library prints as it ends.
_LAST_LINES = 200

_COSTS = PRIVATE_DIRECTORY / ".cluster.yaml"

_START_RANK = """
import os, socket, sys
socket.sethostname(sys.argv[1])
os.execv(sys.argv[2], sys.argv[2:])
"""

# As CUDA's caching allocator does, and for all dispatchers alike: otherwise every large buffer is
# made of fresh pages from the system, which cost more than the copy into it.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def main(arguments: Sequence[str]) -> int:
    """Build and run; returns the command's exit status, or 2 if it never started."""
    threading.Thread(target=_end_with_standard_input, name="lifeline", daemon=True).start()
    as_json = arguments[0] == "--json"
    cluster_json, *command = arguments[as_json:]
    cluster = EmulatedCluster.from_json(cluster_json)
    try:
        build_network(cluster)
    except UserError as error:
        tell("emulate", str(error))
        return 2
    size = f"{counted(cluster.nodes, 'node')} x {counted(cluster.ranks_per_node, 'rank')}"
    tell("emulate", f"{size}, a NIC of {cluster.inter_mbit:g} Mbit/s on each node")
    _COSTS.write_text(dump_cluster(default_costs(cluster)))
    num_ranks = cluster.nodes * cluster.ranks_per_node
    ranks = [_Rank(cluster, number, command, as_json) for number in range(num_ranks)]
    status = _status_of(_follow(ranks))
    if as_json:
        print(json.dumps({"cluster": dataclasses.asdict(cluster), "exit_status": status}, indent=2))
    return status


def _end_with_standard_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


class _Rank:
    """A rank of the command: its process, and the pipe that it writes to.

    Args:
        cluster: emulated cluster.
        number: number of the rank among all ranks.
        command: script, or "-m" and a module, with arguments.
        as_json: whether rank 0's standard output goes to standard error too.
    """

    def __init__(
        self, cluster: EmulatedCluster, number: int, command: Sequence[str], as_json: bool
    ) -> None:
        node, local_rank = divmod(number, cluster.ranks_per_node)
        name = cluster.node_names[node]
        # -S -E: a bare interpreter starts in a fraction of the time.
        start = ["unshare", "--uts", sys.executable, "-S", "-E", "-c", _START_RANK, name]
        self.number = number
        self.pipe, into = os.pipe()
        self.process = subprocess.Popen(
            [*in_node(name), *start, sys.executable, "-u", *command],
            env={
                **KEEP_FREED_MEMORY,
                "OMP_NUM_THREADS": "1",
                # Costs for a training's planner, unless it is given others.
                "MOE_MONTA_CLUSTER": str(_COSTS),
                **os.environ,
                "RANK": str(number),
                "WORLD_SIZE": str(cluster.nodes * cluster.ranks_per_node),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(cluster.ranks_per_node),
                "MASTER_ADDR": cluster.address(0),
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": NIC,
                # CPU ranks, even where there is a GPU.
                "MONTA_CPU_RANKS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                ENVIRONMENT_VARIABLE: cluster.to_json(),
            },
            stdin=subprocess.DEVNULL,
            stdout=into if number or as_json else None,
            stderr=into,
        )
        os.close(into)
        self._label = f"[node {node} rank {number}] ".encode()
        self._rest = b""
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)

    def forward(self) -> bool:
        """Copy lines from the pipe to standard error; returns whether more may come."""
        content = os.read(self.pipe, 1 << 16)
        *lines, self._rest = (self._rest + content).split(b"\n")
        if not content and self._rest:
            lines = [self._rest]
        for line in lines:
            self.last_lines.append(line.decode(errors="replace"))
            os.write(2, self._label + line + b"\n")
        return content != b""


def _follow(ranks: Sequence[_Rank]) -> _Rank | None:
    """Forward output until all ranks have ended; returns the first that failed, if any."""
    failed: _Rank | None = None
    num_running, deadline = len(ranks), float("inf")
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
            selector.register(os.pidfd_open(rank.process.pid), selectors.EVENT_READ, rank)
        while selector.get_map() and (seconds := deadline - time.monotonic()) > 0:
            # It refuses an infinite timeout.
            for key, _ in selector.select(min(seconds, 60.0)):
                rank = key.data
                if key.fd == rank.pipe:
                    if not rank.forward():
                        selector.unregister(rank.pipe)
                    continue
                selector.unregister(key.fd)
                num_running -= 1
                if rank.process.wait() != 0 and failed is None:
                    failed, deadline = rank, time.monotonic() + _GRACE_SECONDS
                if num_running == 0:
                    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    return failed


def _status_of(failed: _Rank | None) -> int:
    """Exit status of the command, whose reason is reported if a rank has failed."""
    if failed is None:
        return 0
    status: int = failed.process.returncode
    status = status if status >= 0 else 128 - status
    lines = failed.last_lines
    cause = cause_of(lines) or next(filter(str.strip, reversed(lines)), "it said nothing")
    tell("emulate", f"rank {failed.number} ended first, {ended(status)}: {cause}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
