"""`monta calibrate` as a command: its file, its JSON, what stops it, and how it goes on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from monta_megatron.planner.experts import experts_on

from monta_megatron.chains.layout import Layout
from monta_megatron.common import strict_yaml
from monta_megatron.integration.options import Options
from monta_megatron.integration.policy import policy_for
from monta_megatron.planner.chain_policy import PlannedPolicy
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.tools.calibrate.record import alone

# Seconds; a launch takes 20 where nothing else runs.
LIMIT_S = 240
ENVIRON = {**os.environ, "MONTA_CPU_RANKS": "1", "OMP_NUM_THREADS": "1"}


# What a rank of a launch of two finds; nothing is started.
RANK_OF_TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def command_of(out: Path) -> list[str]:
    """4 ranks that stand for 2 nodes, as few repeats as there may be, with a model's experts."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "4"),
        *("-m", "monta_megatron.cli", "calibrate", "--ranks-per-node", "2", "--nics-per-node", "1"),
        *("--model", "quickstart", "--budget-seconds", "1", "--out", str(out), "--json"),
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
    assert_auto_reads_experts(out)


def test_network_interfaces_of_stand_ins_have_to_be_given(tmp_path: Path) -> None:
    command = command_of(tmp_path / "cluster.yaml")
    place = command.index("--nics-per-node")
    done = subprocess.run(
        command[:place] + command[place + 2 :],
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode != 0 and done.stdout == ""
    said = "monta calibrate: --nics-per-node: not given, must be the interfaces of a node: "
    assert done.stderr.count(f"{said}several nodes are on one host\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def assert_auto_reads_experts(path: Path) -> None:
    """A training with the switch is planned by what was measured of a rank's two experts."""
    config = SimpleNamespace(
        hidden_size=64,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_ffn_hidden_size=256,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        moe_monta_cluster=str(path),
        moe_monta_overlap_experts=True,
    )
    layout = Layout(ep=4, etp=1, num_local_experts=2, rank=0, nodes=(0, 0, 1, 1))
    policy = policy_for(Options.of(config), config, layout, permuted_only=False)
    assert isinstance(policy, PlannedPolicy)
    (curve,) = experts_on(load_cluster(path))
    experts = policy.workload.experts
    assert experts is not None and experts.note == f"measured: {curve.source}"
    assert curve.rows_per_expert == (1, 4, 16, 64)
    assert experts.forward_us == curve.forward_us and experts.backward_us == curve.backward_us
    prices = policy.selection(512).prices
    assert {price.experts_pipelined for price in prices} == {False, True}
    # They are not alone in a layer that is split.
    contended = {pair.pair for pair in policy.cluster.contention if "compute" in pair.pair}
    assert contended
    assert policy.choose(512).experts_pipelined is not None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--out: not given, must be the file to write"),
        ("--out missing/c.yaml", "--out: got missing/c.yaml, must be a file in a folder that"),
        ("--out c.yaml --budget-seconds -1", "--budget-seconds: got '-1', must be a number > 0"),
        ("--out c.yaml --ranks-per-node 0", "--ranks-per-node: got '0', must be an integer >= 1"),
        ("--out c.yaml", "-m monta_megatron.cli calibrate --out FILE ..., srun, or monta emulate"),
        ("--out c.yaml --ep 2", "--ep: got 2, must come with --model"),
        ("--out c.yaml --model nothing", "nothing: "),
        ("--out c.yaml --model quickstart --ep 3", "--ep: got 3 with --etp 1, must be such that"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, flags: str, message: str) -> None:
    of_model = "--model" in flags or "--ep" in flags
    done = subprocess.run(
        [sys.executable, "-m", "monta_megatron.cli", "calibrate", *flags.split()],
        env={**os.environ, **(RANK_OF_TWO if of_model else {})},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
