"""`monta emulate` for real: rates, outputs, exit status, and that nothing stays behind."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import rank_programs
from interrupts import LIMIT_S, marked, network_names, started, wait_for, wait_until
from namespaces import skip_without_namespaces

MBIT = 200
# A link is never faster than its setting (what is queued when a measurement starts aside); how much
# slower depends on what else the machine does, so this does not test the last percent.
RATE_MBIT = (0.3 * MBIT, 1.02 * MBIT)

skip_without_namespaces()


def command(nodes: int, ranks: int, program: str, *flags: str) -> list[str]:
    """A command line of `monta emulate`, at `MBIT`."""
    emulate = f"emulate --nodes {nodes} --ranks-per-node {ranks} --inter-mbit {MBIT}".split()
    words = [*emulate, *flags, "--", rank_programs.__file__, *program.split()]
    return [sys.executable, "-m", "monta_megatron", *words]


def run(words: list[str], status: int = 0) -> tuple[bytes, str]:
    done = subprocess.run(words, capture_output=True, timeout=2 * LIMIT_S)
    assert done.returncode == status, done.stderr.decode()
    return done.stdout, done.stderr.decode()


def test_outputs_hosts_and_environment() -> None:
    stdout, said = run(command(2, 2, "write"))
    assert stdout == rank_programs.BYTES_OF_RANK_0
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
    stdout, _ = run(command(4, 1, "incast"))
    assert RATE_MBIT[0] <= float(stdout) <= RATE_MBIT[1]


def test_only_what_changes_node_uses_the_network() -> None:
    num_bytes = 1_200_000
    stdout, said = run(command(2, 2, f"exchange {num_bytes}"))
    other = re.search(r"\[node 1 rank 2\] (\d+)", said)
    assert other is not None, said
    # Half of what each of the two ranks has goes to the other node.
    for sent in (stdout, other.group(1)):
        assert int(sent) == pytest.approx(num_bytes, rel=0.06)


def test_status_of_the_first_rank_to_fail_and_json() -> None:
    stdout, said = run(command(2, 2, "fail 3 7", "--json"), status=7)
    printed = json.loads(stdout)
    assert (printed["exit_status"], printed["cluster"]["inter_mbit"]) == (7, MBIT)
    # After the line about the cluster.
    assert said.splitlines()[1:] == [
        "[node 1 rank 3] no more of this",
        "monta emulate: rank 3 ended first, with exit status 7: no more of this",
    ]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_stays_after_a_signal(number: int, status: int, tmp_path: Path) -> None:
    """Ctrl-C is in test_ctrl_c.py."""
    before, (stdout, stderr) = network_names(), (tmp_path / "stdout", tmp_path / "stderr")
    with started(command(2, 1, "linger")[1:], tmp_path) as (process, mark):
        wait_for(process, lambda: stdout.read_text() == "lingers\n", stderr)
        process.send_signal(number)
        assert process.wait(timeout=LIMIT_S) == status
        if number == signal.SIGTERM:
            # The ranks are gone when the command returns, and it says one line.
            assert marked(mark) == []
            last = stderr.read_text().splitlines()[-1]
            assert last == "monta emulate: interrupted; every rank has ended"
        # After SIGKILL the kernel takes a moment.
        wait_until(lambda: not marked(mark), 60)
    assert network_names() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give it up")
def test_user_namespaces_serve_who_is_not_root(tmp_path: Path) -> None:
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    Path("/run/netns").mkdir(exist_ok=True)
    for trial in ([sys.executable, "-c", "import monta_megatron"], ["unshare", "--user", "true"]):
        if subprocess.run([*nobody, *trial], capture_output=True).returncode != 0:
            pytest.skip(f"nobody may not run {' '.join(trial)}")
    stdout, _ = run([*nobody, "env", f"HOME={tmp_path}", *command(2, 1, "incast")])
    assert RATE_MBIT[0] <= float(stdout) <= RATE_MBIT[1]
