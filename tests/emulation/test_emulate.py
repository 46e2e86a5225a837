"""`monta emulate` for real: rates, outputs, exit status, and that nothing stays behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import programs
import pytest
from interrupts import marked, network_names, started, wait_for
from namespaces import skip_without_namespaces

PROGRAMS = programs.__file__
MONTA = [sys.executable, "-m", "monta_megatron"]
TIME_LIMIT_SECONDS = 240

MBIT = 200
# A link is never faster than its setting (what is queued when a measurement starts aside); how much
# slower depends on what else the machine does, so this does not test the last percent.
RATE_MBIT = (0.3 * MBIT, 1.02 * MBIT)

skip_without_namespaces()


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


def test_incast_of_three_nodes_is_one_nic() -> None:
    result = run(command("incast", nodes=4))
    said = result.stderr.decode()
    assert result.returncode == 0, said
    assert within(float(result.stdout))


def test_only_what_changes_node_uses_the_network() -> None:
    num_bytes = 1_200_000
    result = run(command("exchange", str(num_bytes), ranks_per_node=2))
    said = result.stderr.decode()
    assert result.returncode == 0, said
    other = re.search(r"\[node 1 rank 2\] (\d+)", said)
    assert other is not None, said
    # Half of what each of the two ranks has goes to the other node.
    for sent in (result.stdout, other.group(1)):
        assert int(sent) == pytest.approx(num_bytes, rel=0.06)


def test_status_of_the_first_rank_to_fail_and_json() -> None:
    result = run(command("fail", "3", "7", ranks_per_node=2, flags=["--json"]))
    assert result.returncode == 7, result.stderr.decode()
    printed = json.loads(result.stdout)
    assert printed["exit_status"] == 7
    assert printed["cluster"]["inter_mbit"] == MBIT
    # After the line about the cluster.
    assert result.stderr.decode().splitlines()[1:] == [
        "[node 1 rank 3] no more of this",
        "monta emulate: rank 3 ended first, with exit status 7: no more of this",
    ]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_stays_after_a_signal(number: int, status: int, tmp_path: Path) -> None:
    """Ctrl-C is in test_ctrl_c.py."""
    before, (stdout, stderr) = network_names(), (tmp_path / "stdout", tmp_path / "stderr")
    with started(command("linger")[1:], tmp_path) as (process, mark):
        wait_for(process, lambda: stdout.read_text() == "started\n", stderr)
        process.send_signal(number)
        assert process.wait(timeout=TIME_LIMIT_SECONDS) == status
        if number == signal.SIGTERM:
            # The ranks are gone when the command returns, and it says one line.
            assert marked(mark) == []
            last = stderr.read_text().splitlines()[-1]
            assert last == "monta emulate: interrupted; every rank has ended"
        # After SIGKILL the kernel takes a moment.
        deadline = time.monotonic() + 60
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marked(mark) == []
    assert network_names() == before


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
