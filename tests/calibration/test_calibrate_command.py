"""`monta calibrate` as a command: its file, its JSON, its table, and what ends it."""

import json
import os
import signal
import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from commands import Monta
from interrupts import marked, started, wait_for

from monta_megatron.calibration.command import Calibration, nccl_rows
from monta_megatron.common import strict_yaml
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.curves import Curve

# Seconds; a launch takes 20 where nothing else runs.
LIMIT_S = 240
ENVIRON = {**os.environ, "MONTA_CPU_RANKS": "1", "OMP_NUM_THREADS": "1"}
MEMORY_ROWS = {"copy memory 1", "sum memory 1"}
LINK_ROWS = {
    *("alltoall network 2", "alltoall network 4", "allgather network 4"),
    *("alltoall node_link 2", "allgather node_link 2"),
}


def command_of(out: Path, budget_s: float) -> list[str]:
    """4 ranks that stand for 2 nodes."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "4"),
        *("-m", "monta_megatron", "calibrate", "--ranks-per-node", "2", "--nics-per-node", "1"),
        *("--budget-seconds", str(budget_s), "--out", str(out), "--json"),
    ]


def test_a_calibration_writes_the_file_that_a_plan_reads(tmp_path: Path) -> None:
    """In less time than it takes to import torch: the fewest sizes, each once."""
    out = tmp_path / "cluster.yaml"
    done = subprocess.run(
        command_of(out, 1), env=ENVIRON, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    cluster, document = load_cluster(out), json.loads(done.stdout)
    assert document["cluster"] == strict_yaml.plain(cluster)
    assert (document["runs"], document["ctas"]) == (1, {})
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.nics_per_node) == (2, 2, 1)
    assert cluster.policy == "host"
    rows = {str(curve).rsplit(" ", len(curve.sizes_bytes))[0] for curve in cluster.curves}
    assert rows == MEMORY_ROWS | LINK_ROWS
    names = ("network", "node_link", "memory")
    assert {row[:2] for row in cluster.contention} == set(permutations(names, 2))
    assert len(out.read_text().splitlines()) <= 40
    assert "size (B) time (us) algbw (GB/s) busbw (GB/s)" in done.stderr
    assert "monta calibrate: more runs, by seconds" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_rank_that_dies_ends_all_and_leaves_no_file(tmp_path: Path) -> None:
    stderr = tmp_path / "stderr"
    words = command_of(tmp_path / "cluster.yaml", 1000)
    with started(words[1:], tmp_path, MONTA_CPU_RANKS="1") as (process, mark):
        wait_for(process, lambda: "more runs" in stderr.read_text(), stderr)
        os.kill(min(marked(mark, RANK="3")), signal.SIGKILL)
        assert process.wait(timeout=LIMIT_S) != 0
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


@pytest.mark.parametrize(
    ("operation", "resource", "ranks", "rates"),
    [
        # A rank of 2 x 4 sends half of its 8 parts over the network: 4 MB of 8, in 1 ms.
        ("alltoall", "inter", 8, ((8, "8.00", "7.00"), (32, "10.00", "8.75"))),
        # Of 5 ranks of a node it sends 4 parts of 5.
        ("allgather", "intra", 5, ((5, "5.00", "4.00"), (20, "6.25", "5.00"))),
        # In memory nothing is shared.
        ("copy", "memory", 1, ((4, "4.00", None), (16, "5.00", None))),
    ],
)
def test_sizes_and_rates_as_nccl_tests_counts_them(
    operation: Any, resource: Any, ranks: int, rates: Any
) -> None:
    """In MB, algbw and busbw."""
    curve = Curve(
        operation=operation,
        resource=resource,
        group_size=ranks,
        sizes_bytes=(4_000_000, 16_000_000),
        times_us=(1000.0, 3200.0),
    )
    assert nccl_rows(curve, num_nodes=2) == [
        (1_000_000 * size, us, *rate)
        for (size, *rate), us in zip(rates, ("1000.0", "3200.0"), strict=True)
    ]


def test_communicators_are_printed_with_their_ctas() -> None:
    cluster = load_cluster("h100_8x_ndr")
    report = Calibration(cluster=cluster, runs=5, ctas={"8 ranks, network": "default to 16"})
    assert report.text().splitlines()[-2:] == [
        "communicator of 8 ranks, network: CTAs default to 16",
        "medians of 5 runs or more",
    ]


def test_outside_of_a_launch_it_says_how_to_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, monta: Monta
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    line = monta.refusal("calibrate", "--out", "c.yaml")
    assert "-m monta_megatron calibrate --out FILE" in line
    assert list(tmp_path.iterdir()) == []
