"""Builds and measures an emulated cluster's network, then runs a command on it under torchrun.

Runs as the first process of a sandbox, with network, mount and process namespaces of its own:

    python -m monta_megatron.emulation.emulator [--json] CLUSTER_JSON SCRIPT_OR_MODULE...

Names under /run/netns, interfaces, bridges and mounts are visible to it alone, need no unique
names, and are removed by the kernel when it ends, with every process that it started. That holds
after a failure or a signal as well as after an ordinary end, so nothing has to be cleaned up. Its
standard input is a lifeline: it ends when the caller does, even by SIGKILL, and the sandbox then
ends as well (`end_with_standard_input`).

Rank 0's standard output passes through untouched; everything else goes to standard error, line by
line, labelled with the node and rank that it comes from. With --json the document is the only thing
on standard output, and rank 0's output is treated like that of the others. Where a rank fails, the
last line says which was the first, and why.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from monta_megatron.common import strict_yaml
from monta_megatron.common.files import write_whole
from monta_megatron.common.ranks import cause_of, ended
from monta_megatron.common.text import shown
from monta_megatron.common.units import counted
from monta_megatron.emulation import link_rate, network
from monta_megatron.emulation.cluster import ENVIRONMENT_VARIABLE, EmulatedCluster, default_costs
from monta_megatron.emulation.network import PRIVATE_DIRECTORY, in_node

# Folders with commands that may be missing from the PATH of a user who is not root.
_SYSTEM_PATHS = "/usr/local/sbin:/usr/sbin:/sbin"

_ADVICE = (
    "run as root, in a container with --privileged, or allow user namespaces (sysctl "
    "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
)

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "util-linux"}


def run(command: Sequence[str]) -> int:
    """Run a command in private namespaces; returns its exit status, or 128 + n for signal n.

    Raises:
        ValueError: the namespaces cannot be made here.
        KeyboardInterrupt: on an interrupt, after everything inside has ended.
    """
    unshare = unshare_command()
    # A session of its own: Ctrl-C reaches only this process, which ends what is inside in order.
    with subprocess.Popen(
        [*unshare, *command], env=_environ(), stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin is not None
        try:
            status = process.wait()
        finally:
            process.stdin.close()
            process.wait()
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
    trial = subprocess.run([*unshare, "true"], env=environ, capture_output=True, text=True)
    if trial.returncode != 0:
        said = "; ".join(trial.stderr.strip().splitlines())
        raise ValueError(f"private namespaces cannot be made ({said}): {_ADVICE}")
    return unshare


def end_with_standard_input() -> None:
    """In the sandboxed command: end this process, and so the namespaces, when the lifeline ends."""

    def wait_and_end() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=wait_and_end, name="lifeline", daemon=True).start()


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATHS}"}


# After one node has failed, the others get this long to fail too and to report why.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
# The longest wait for output of processes that outlive their launcher.
_LAST_WORDS_SECONDS = 2.0
# Of each rank, to tell why it failed: a traceback, and what a library prints as it ends.
_LAST_LINES = 200

# A link that reaches less than this share of its setting is limited by the machine.
_EXPECTED_SHARE = 0.9

_EXIT_STATUSES = PRIVATE_DIRECTORY / ".exit_statuses"
_COSTS = PRIVATE_DIRECTORY / ".cluster.yaml"

_START_NODE = """
import os, socket, sys
socket.sethostname(sys.argv[1])
os.execvp(sys.argv[2], sys.argv[2:])
"""

# The script that torchrun starts for each rank. Arguments: directory, number of NICs, rank whose
# standard output is kept, the rank's command. The shell stays in order to note the exit status as
# soon as the rank exits: torchrun's own is always 1, and the first rank to fail is the cause.
_START_RANK = """
export GLOO_SOCKET_IFNAME=nic$((LOCAL_RANK % $1))
exec 2>"$0/.rank$RANK"
[ "$RANK" = "$2" ] || exec >&2
shift 2
"$@"
status=$?
echo "$RANK $status" >>"$0/.exit_statuses"
exit "$status"
"""

# As CUDA's caching allocator does, and for all dispatchers alike: otherwise every large buffer is
# made of fresh pages from the system, which cost more than the copy into it.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def main(arguments: Sequence[str]) -> int:
    """Build, measure, run; returns the command's exit status, or 2 if it never started."""
    end_with_standard_input()
    as_json = arguments[0] == "--json"
    cluster_json, *command = arguments[as_json:]
    cluster = EmulatedCluster.from_json(cluster_json)
    try:
        network.build(cluster)
        cluster = _measured(cluster)
    except ValueError as error:
        _say(str(error))
        return 2
    _report(cluster)
    status = _run(cluster, command, stdout_rank=None if as_json else 0)
    if as_json:
        print(json.dumps({"cluster": dataclasses.asdict(cluster), "exit_status": status}, indent=2))
    return status


def _say(text: str) -> None:
    os.write(2, f"{shown(f'monta emulate: {text}')}\n".encode())


def _measured(cluster: EmulatedCluster) -> EmulatedCluster:
    first, second = (in_node(name) for name in cluster.node_names[:2])
    return dataclasses.replace(
        cluster,
        measured_inter_gbit_per_s=link_rate.measure_gbit_per_s(second, first, cluster.address(1)),
        measured_intra_gbit_per_s=link_rate.measure_gbit_per_s(first, first, cluster.address(0)),
    )


def _report(cluster: EmulatedCluster) -> None:
    inter, intra = cluster.measured_inter_gbit_per_s, cluster.measured_intra_gbit_per_s
    assert inter is not None and intra is not None, cluster
    _say(
        f"{counted(cluster.nodes, 'node')} x {counted(cluster.ranks_per_node, 'rank')}, one NIC "
        f"per {cluster.nic_per} at {cluster.inter_mbit:g} Mbit/s; one stream reaches "
        f"{inter:.4g} Gbit/s between nodes, {intra:.3g} Gbit/s inside"
    )
    if inter * 1000 < _EXPECTED_SHARE * cluster.inter_mbit:
        _say("note: between nodes this machine is the limit, not the setting")


def _run(cluster: EmulatedCluster, command: Sequence[str], stdout_rank: int | None) -> int:
    """Run the command on every node; returns the exit status of the first rank to fail."""
    _EXIT_STATUSES.touch()
    write_whole(_COSTS, strict_yaml.dump(default_costs(cluster)))
    forwarder = _Forwarder()
    with _rank_pipes(cluster, forwarder):
        nodes = [_start_node(cluster, node, command, stdout_rank) for node in range(cluster.nodes)]
        for node, process in enumerate(nodes):
            assert process.stderr is not None
            forwarder.add(process.stderr, f"[node {node}]")
        launcher_status = _wait(nodes)
    forwarder.finish()
    for line in _EXIT_STATUSES.read_text().splitlines():
        rank, status = map(int, line.split())
        if status != 0:
            said = forwarder.last_lines[_label(cluster, rank)]
            cause = cause_of(said) or next(filter(str.strip, reversed(said)), "it said nothing")
            _say(f"rank {rank} ended first, {ended(status)}: {cause}")
            return status
    return launcher_status


def _start_node(
    cluster: EmulatedCluster, node: int, command: Sequence[str], stdout_rank: int | None
) -> subprocess.Popen[bytes]:
    """Start torchrun on one node, which has a host name of its own."""
    name, address = cluster.node_names[node], cluster.address(node)
    rank_command = [
        *("sh", "-c", _START_RANK, str(PRIVATE_DIRECTORY), str(cluster.nics_per_node)),
        *(str(stdout_rank), sys.executable, "-u", *command),
    ]
    torchrun = [
        *(sys.executable, "-m", "monta_megatron.common.torchrun"),
        *("--nnodes", str(cluster.nodes), "--node-rank", str(node)),
        *("--nproc-per-node", str(cluster.ranks_per_node)),
        *("--master-addr", cluster.address(0), "--master-port", "29500", "--local-addr", address),
        *("--no-python", *rank_command),
    ]
    return subprocess.Popen(
        [*in_node(name), "unshare", "--uts", sys.executable, "-c", _START_NODE, name, *torchrun],
        # CPU ranks, even where there is a GPU.
        env={
            **KEEP_FREED_MEMORY,
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "MONTA_CPU_RANKS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # Costs for a training's planner, unless it is given others.
            "MOE_MONTA_CLUSTER": os.environ.get("MOE_MONTA_CLUSTER", str(_COSTS)),
            ENVIRONMENT_VARIABLE: cluster.to_json(),
        },
        stdin=subprocess.DEVNULL,
        stdout=None if node == 0 and stdout_rank == 0 else sys.stderr,
        stderr=subprocess.PIPE,
    )


def _wait(nodes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for the launchers; returns the first exit status that is not 0, or 0."""
    running, status, deadline = list(nodes), 0, float("inf")
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        for node in [node for node in running if node.poll() is not None]:
            running.remove(node)
            if node.returncode and not status:
                status = node.returncode if node.returncode > 0 else 128 - node.returncode
                deadline = time.monotonic() + _GRACE_SECONDS
    return status


@contextmanager
def _rank_pipes(cluster: EmulatedCluster, forwarder: "_Forwarder") -> Iterator[None]:
    """A named pipe for each rank's output, since torchrun passes no file descriptors to its ranks.

    Until the context ends we hold a writing end of each as well, so that a reader neither waits for
    its rank to open the pipe nor mistakes a rank that has not started for one that has ended.
    """
    with ExitStack() as stack:
        for rank in range(cluster.nodes * cluster.ranks_per_node):
            path = PRIVATE_DIRECTORY / f".rank{rank}"
            os.mkfifo(path)
            stack.callback(os.close, os.open(path, os.O_RDWR))
            forwarder.add(path.open("rb"), _label(cluster, rank))
        yield


def _label(cluster: EmulatedCluster, rank: int) -> str:
    return f"[node {rank // cluster.ranks_per_node} rank {rank}]"


class _Forwarder:
    """Copies lines to standard error with a label in front, one thread per source."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        # By label, the end of what a source has said.
        self.last_lines: dict[str, deque[str]] = {}

    def add(self, lines: Iterable[bytes], label: str) -> None:
        """Start copying from a source."""
        last_lines = self.last_lines[label] = deque(maxlen=_LAST_LINES)
        thread = threading.Thread(target=self._copy, args=(lines, label, last_lines), daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait for the sources to end."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    @staticmethod
    def _copy(lines: Iterable[bytes], label: str, last_lines: "deque[str]") -> None:
        for line in lines:
            line = line.rstrip(b"\n")
            last_lines.append(line.decode(errors="replace"))
            os.write(2, label.encode() + b" " + line + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
