"""`monta calibrate` as a command: its file, its JSON, its table, and what ends it."""

import json
import os
import signal
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import golden
from interrupts import marked, started, wait_for
from run_python import run_python

from monta_megatron.calibration.command import Calibration
from monta_megatron.common import strict_yaml
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.curves import Curve

# Seconds; a launch takes 20 where nothing else runs.
LIMIT_S = 240
MEMORY_ROWS = {"copy memory 1", "sum memory 1"}
LINK_ROWS = {
    *("alltoall network 2", "alltoall network 4", "allgather network 4"),
    *("alltoall node_link 2", "allgather node_link 2"),
}


def command_of(out: Path, budget_s: float) -> list[str]:
    """Arguments of Python: 4 ranks that stand for 2 nodes, with planted times."""
    return [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        str(Path(__file__).with_name("calibrate_with_times.py")),
        *("--ranks-per-node", "2", "--nics-per-node", "1"),
        *("--budget-seconds", str(budget_s), "--out", str(out), "--json"),
    ]


def test_a_calibration_writes_the_file_that_a_plan_reads(tmp_path: Path) -> None:
    """In less time than it takes to import torch: the fewest sizes, each once, and marked so."""
    out = tmp_path / "cluster.yaml"
    done = run_python(*command_of(out, 1), limit_s=LIMIT_S, MONTA_CPU_RANKS="1")
    assert done.returncode == 0, done.stderr
    cluster, document = load_cluster(out), json.loads(done.stdout)
    assert document["cluster"] == strict_yaml.plain(cluster)
    assert (document["runs"], document["ctas"]) == (1, {})
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.nics_per_node) == (2, 2, 1)
    assert cluster.policy == "host"
    rows = {str(curve).rsplit(" ", len(curve.sizes_bytes))[0] for curve in cluster.curves}
    assert rows == MEMORY_ROWS | LINK_ROWS
    for row in rows:
        assert f"{row}: 3 sizes of 3 ran once, and have no median" in document["notes"]
    names = ("network", "node_link", "memory")
    assert {row[:2] for row in cluster.contention} == set(permutations(names, 2))
    assert len(out.read_text().splitlines()) <= 40
    assert "size (B) time (us) algbw (GB/s) busbw (GB/s)" in done.stderr
    assert "monta calibrate: more runs, by seconds" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_flat_curve_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    words = command_of(tmp_path / "cluster.yaml", 1)
    planted = {"MONTA_CPU_RANKS": "1", "FLAT_CURVE": "alltoall node_link 2"}
    done = run_python(*words, limit_s=LIMIT_S, **planted)
    # torchrun's own status for a rank that fails.
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = (line for line in done.stderr.splitlines() if "refused" in line)
    assert "1 curve refused; alltoall node_link 2: 81,920 bytes take 1.00 times as long" in line
    assert line.endswith("with more --budget-seconds; nothing was written")
    assert not list(tmp_path.iterdir())


def test_a_rank_that_dies_ends_all_and_leaves_no_file(tmp_path: Path) -> None:
    stderr = tmp_path / "stderr"
    words = command_of(tmp_path / "cluster.yaml", 1000)
    with started(words, tmp_path, MONTA_CPU_RANKS="1") as (process, mark):
        wait_for(process, lambda: "more runs" in stderr.read_text(), stderr)
        os.kill(min(marked(mark, RANK="3")), signal.SIGKILL)
        assert process.wait(timeout=LIMIT_S) != 0
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


def test_sizes_and_rates_are_those_of_nccl_tests() -> None:
    """A rank of 2 x 4 sends half of its 8 parts over the network, 4 MB of 8, in 1 ms.

    Of 5 ranks of a node it sends 4 parts of 5; in memory nothing is shared.
    """
    points = "4000000:1000 16000000:3200"
    rows = ("alltoall network 8", "alltoall node_link 5", "copy memory 1")
    curves = tuple(Curve.from_text(f"{row} {points}") for row in rows)
    cluster = load_cluster("emulated_2x4_500mbit")
    contention = (("network", "memory", 1.1),)
    cluster = replace(cluster, curves=curves, contention=contention)
    report = Calibration(
        cluster=cluster, runs=5, ctas={"8 ranks, network": "default to 16"}, notes=("a note",)
    )
    golden.check(Path(__file__).with_name("calibration.txt"), f"{report.text()}\n")
