"""`monta emulate` for real: rates, outputs, exit status, and that nothing stays behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import programs
import pytest

from monta_megatron.emulation import emulator

PROGRAMS = programs.__file__
MONTA = [sys.executable, "-m", "monta_megatron.cli"]
TIME_LIMIT_SECONDS = 240

MBIT = 200
# A link is never faster than its setting (what is queued when a measurement starts aside); how much
# slower depends on what else the machine does, so this does not test the last percent.
RATE_MBIT = (0.3 * MBIT, 1.02 * MBIT)

try:
    emulator.unshare_command()
except ValueError as error:
    pytest.skip(f"monta emulate: {error}", allow_module_level=True)
if os.geteuid() != 0 and not Path("/run/netns").exists():
    pytest.skip(
        "monta emulate: /run/netns has to exist for who is not root", allow_module_level=True
    )


def command(
    *program: str, nodes: int = 2, ranks_per_node: int = 1, flags: Sequence[str] = ()
) -> list[str]:
    """A command line of `monta emulate`, at `MBIT`."""
    return [
        *(*MONTA, "emulate", "--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node)),
        *("--inter-mbit", str(MBIT), *flags, "--", PROGRAMS, *program),
    ]


def run(words: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(words, capture_output=True, timeout=TIME_LIMIT_SECONDS)


def within(rate_mbit: float) -> bool:
    low, high = RATE_MBIT
    return low <= rate_mbit <= high


def network_of_this_machine() -> list[str]:
    """What a cluster could leave behind: interfaces and named namespaces."""
    names = ["ip", "-oneline", "link", "show"], ["ip", "netns", "list"]
    shown = [subprocess.run(line, capture_output=True, text=True).stdout for line in names]
    return [re.sub(r" state .*", "", text) for text in shown]


def processes(mark: str) -> list[str]:
    """Command lines that hold a mark, of whatever process there is."""
    command_lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if mark in words:
            command_lines.append(words)
    return command_lines


def test_outputs_hosts_and_environment() -> None:
    result = run(command("write", ranks_per_node=2))
    said = result.stderr.decode()
    assert result.returncode == 0, said
    assert result.stdout == programs.BYTES_OF_RANK_0
    for node, rank in ((0, 1), (1, 2), (1, 3)):
        assert f"[node {node} rank {rank}] a line on standard output\n" in said
    printed = {
        int(rank): json.loads(text) for rank, text in re.findall(r"rank (\d)\] ({.*})", said)
    }
    assert sorted(printed) == [0, 1, 2, 3]
    for rank, values in printed.items():
        assert values == {
            "host": f"node{rank // 2}",
            "costs": f"2 x 2 emulated at {MBIT} Mbit/s, not calibrated",
            "GLOO_SOCKET_IFNAME": "nic0",
            "LOCAL_WORLD_SIZE": "2",
            "MONTA_CPU_RANKS": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }


def test_incast_of_three_nodes_is_one_nic_and_rates_are_measured() -> None:
    result = run(command("incast", nodes=4))
    said = result.stderr.decode()
    assert result.returncode == 0, said
    assert within(float(result.stdout))
    rates = re.search(r"one stream reaches ([\d.]+) Gbit/s between nodes, ([\d.]+) Gbit", said)
    assert rates is not None, said
    inter_gbit_per_s, intra_gbit_per_s = map(float, rates.groups())
    assert within(inter_gbit_per_s * 1000)
    assert intra_gbit_per_s >= 5 * inter_gbit_per_s


def test_every_rank_uses_its_nic() -> None:
    num_bytes = 1_200_000
    rails = ("--nic-per", "rank")
    result = run(command("exchange", str(num_bytes), ranks_per_node=2, flags=rails))
    said = result.stderr.decode()
    assert result.returncode == 0, said
    other = re.search(r"\[node 1 rank 2\] ({.*sent_bytes.*})", said)
    assert other is not None, said
    for printed in (result.stdout, other.group(1)):
        sent = json.loads(printed)["sent_bytes"]
        # Half of what each rank has goes to the other node; the two rails share that of both.
        assert sent == pytest.approx([num_bytes / 2] * 2, rel=0.06)


def test_status_of_the_first_rank_to_fail_and_json() -> None:
    result = run(command("fail", "3", "7", ranks_per_node=2, flags=["--json"]))
    assert result.returncode == 7, result.stderr.decode()
    printed = json.loads(result.stdout)
    assert printed["exit_status"] == 7
    assert printed["cluster"]["inter_mbit"] == MBIT
    assert within(printed["cluster"]["measured_inter_gbit_per_s"] * 1000)
    # One line says why, and torchrun says no more than one for each node.
    lines = result.stderr.decode().splitlines()
    assert lines[-1] == "monta emulate: rank 3 ended first, with exit status 7: no more of this"
    assert sum("torchrun" in line for line in lines) <= 2
    assert not any("Traceback" in line or "ChildFailedError" in line for line in lines)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_nothing_stays_after_a_signal(number: signal.Signals, status: int) -> None:
    before = network_of_this_machine()
    mark = f"mark-{uuid.uuid4()}"
    with subprocess.Popen(
        command("linger", mark), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"started\n"
        assert len(processes(mark)) > 4
        process.send_signal(number)
        assert process.wait(timeout=TIME_LIMIT_SECONDS) == status
        if number != signal.SIGKILL:
            # The ranks are gone when the command returns, and it says one line.
            assert processes(mark) == []
            last = process.stderr.read().splitlines()[-1]
            assert last == b"monta emulate: interrupted; every rank has ended"
    # After SIGKILL the kernel takes a moment.
    deadline = time.monotonic() + 60
    while processes(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes(mark) == []
    assert network_of_this_machine() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give it up")
def test_user_namespaces_serve_who_is_not_root(tmp_path: Path) -> None:
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    Path("/run/netns").mkdir(exist_ok=True)
    for trial in ([sys.executable, "-c", "import monta_megatron"], ["unshare", "--user", "true"]):
        if run([*nobody, *trial]).returncode != 0:
            pytest.skip(f"nobody may not run {' '.join(trial)}")
    result = run([*nobody, "env", f"HOME={tmp_path}", *command("incast")])
    assert result.returncode == 0, result.stderr.decode()
    assert within(float(result.stdout))
