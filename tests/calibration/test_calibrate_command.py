"""`monta calibrate` as a command: its file, its JSON, what stops it, and how it goes on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from monta_megatron.tools.calibrate.record import alone

from monta_megatron.cli import main
from monta_megatron.common import strict_yaml
from monta_megatron.planner.cluster_file import load_cluster

# Seconds; a launch takes 20 where nothing else runs.
LIMIT_S = 240
ENVIRON = {**os.environ, "MONTA_CPU_RANKS": "1", "OMP_NUM_THREADS": "1"}


def command_of(out: Path) -> list[str]:
    """4 ranks that stand for 2 nodes, as few repeats as there may be."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "4"),
        *("-m", "monta_megatron.cli", "calibrate", "--ranks-per-node", "2", "--nics-per-node", "1"),
        *("--budget-seconds", "1", "--out", str(out), "--json"),
    ]


def test_killed_calibration_goes_on_and_writes_the_file(tmp_path: Path) -> None:
    out = tmp_path / "cluster.yaml"
    partial = tmp_path / "cluster.yaml.partial"

    # Step 1: kill it after some samples, hence after the first runs of all points.
    with subprocess.Popen(
        command_of(out), env=ENVIRON, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        end_s = time.monotonic() + LIMIT_S
        while not partial.exists() or partial.read_text().count('"task"') < 10:
            assert process.poll() is None and time.monotonic() < end_s, "no point was kept"
            time.sleep(0.05)
        process.terminate()
    kept = partial.read_text().count('"task"')
    assert not out.exists()

    # Step 2: not while another one writes the record.
    with alone(partial):
        refused = subprocess.run(
            command_of(out), env=ENVIRON, capture_output=True, text=True, timeout=LIMIT_S
        )
    assert refused.returncode != 0 and refused.stdout == ""
    assert f"monta calibrate: {partial}: is being written by another calibration" in refused.stderr

    # Step 3: the same command again.
    done = subprocess.run(
        command_of(out), env=ENVIRON, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    cluster = load_cluster(out)
    assert document["cluster"] == strict_yaml.plain(cluster)
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.nics_per_node) == (2, 2, 1)
    assert cluster.copies_block_host
    # The last line may have been cut short.
    assert document["kept_samples"] >= kept - 1
    assert not partial.exists()
    assert "2 ranks and 1 network interface on each of 2 nodes" in done.stderr
    assert "alltoall of 4 ranks" in done.stderr and "alltoall_perf" not in done.stderr
    # A second is too little time, which is said and stays in the file.
    assert "doubt: calibrated in 1 round, medians need 5" in done.stderr
    assert cluster.doubts and document["cluster"]["doubts"] == list(cluster.doubts)


def test_outside_of_a_launch_it_says_how_to_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["calibrate", "--out", "c.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "-m monta_megatron.cli calibrate --out FILE ..., srun, or monta emulate" in line
    assert list(tmp_path.iterdir()) == []
