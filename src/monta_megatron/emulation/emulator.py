"""Builds an emulated cluster's network, then runs a command on it, once per rank.

Runs as the first process of a sandbox, with network, mount and process namespaces of its own:

    python -m monta_megatron.emulation.emulator [--json] CLUSTER_JSON SCRIPT_OR_MODULE...

Names under /run/netns, interfaces, bridges and mounts are visible to it alone, need no unique
names, and are removed by the kernel when it ends, with every process that it started. That holds
after a failure or a signal as well as after an ordinary end, so nothing has to be cleaned up. Its
standard input is a lifeline: it ends when the caller does, even by SIGKILL, and the sandbox then
ends as well.

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

from monta_megatron.common.text import counted, tell
from monta_megatron.common.torchrun import cause_of, ended
from monta_megatron.emulation import network
from monta_megatron.emulation.cluster import (
    ENVIRONMENT_VARIABLE,
    NIC,
    EmulatedCluster,
    default_costs,
)
from monta_megatron.emulation.network import PRIVATE_DIRECTORY, in_node
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
        ValueError: the namespaces cannot be made here.
    """
    unshare = unshare_command()
    standard_input, lifeline = os.pipe()
    interrupts: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        if not interrupts:
            os.close(lifeline)
        interrupts.append(number)

    # Set for SIGINT too: a shell starts background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    # A session of its own: Ctrl-C reaches only this process, which ends what is inside in order.
    status = subprocess.call(
        [*unshare, *command], env=_environ(), stdin=standard_input, start_new_session=True
    )
    if interrupts:
        tell("emulate", "interrupted; every rank has ended")
        return 128 + interrupts[0]
    return status if status >= 0 else 128 - status


def unshare_command() -> list[str]:
    """The words to put in front of a command to run it in private namespaces.

    Raises:
        ValueError: they cannot be made here; says what is missing and how to get it.
    """
    environ = _environ()
    for name, package in _PACKAGES.items():
        if shutil.which(name, path=environ["PATH"]) is None:
            raise ValueError(
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
        raise ValueError(f"private namespaces cannot be made ({said}): {_ADVICE}")
    return unshare


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATHS}"}


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
        network.build(cluster)
    except ValueError as error:
        tell("emulate", str(error))
        return 2
    nodes, ranks = counted(cluster.nodes, "node"), counted(cluster.ranks_per_node, "rank")
    tell("emulate", f"{nodes} x {ranks}, a NIC of {cluster.inter_mbit:g} Mbit/s on each node")
    _COSTS.write_text(dump_cluster(default_costs(cluster)))
    num_ranks = cluster.nodes * cluster.ranks_per_node
    status = _status_of(
        _follow([_Rank(cluster, rank, command, as_json) for rank in range(num_ranks)])
    )
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
        cluster: the cluster.
        number: its number among all ranks.
        command: a script or "-m" and a module, with arguments.
        as_json: standard output is not for rank 0 either.
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
            # An infinite time is none that it takes.
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
