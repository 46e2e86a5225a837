"""The scripts of scripts/slurm/ on a Slurm of two nodes, with CPU ranks."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from interrupts import processes_with
from slurm_cluster import KILL_WAIT_S, Cluster, missing, running_cluster

from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.tools.launch.start import START

if reason := missing():
    pytest.skip(f"no Slurm: {reason}", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SLURM, QUICKSTART = ROOT / "scripts" / "slurm", ROOT / "scripts" / "quickstart"
RANKS = Path(__file__).with_name("slurm_ranks.py")

# Seconds; a job takes about 20 where nothing else runs.
JOB_LIMIT_S = 200

ITERATIONS, SIGNALLED_ITERATION = 5, 2
TRAINING = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
    --seq-length 32 --max-position-embeddings 32 --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-router-topk 2
    --moe-token-dispatcher-type monta --moe-monta-chain alltoall_allgather
    --tensor-model-parallel-size 2 --sequence-parallel
    --expert-model-parallel-size 2 --expert-tensor-parallel-size 2
    --micro-batch-size 2 --global-batch-size 4 --lr 5e-3 --seed 7
    --tokenizer-type NullTokenizer --vocab-size 256 --split 100,0,0
    --train-iters {ITERATIONS} --eval-iters 0 --eval-interval 100 --log-interval 1
    --distributed-timeout-minutes 2 --record record.jsonl
"""
# The format that starts no further processes to write with.
CHECKPOINTS = "--save checkpoint --load checkpoint --save-interval 100 --ckpt-format torch"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


def complete(slurm: Cluster, job: str, folder: Path) -> str:
    """The log of a job that has to end well."""
    fields = slurm.wait(job, JOB_LIMIT_S)
    log = (folder / f"{job}.log").read_text()
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), f"{fields}\n{log}"
    return log


def losses(folder: Path) -> list[float]:
    """Unrounded, those of all starts of the job."""
    record = folder / "record.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def printed_iterations(log: str) -> list[int]:
    return [int(number) for number in re.findall(r"iteration +(\d+)/.* lm loss: ", log)]


@pytest.mark.timeout(3 * JOB_LIMIT_S)
def test_a_requeued_training_has_the_losses_of_an_unbroken_one(
    slurm: Cluster, tmp_path: Path
) -> None:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("needs megatron.training: pip install 'megatron-core[training]>=0.19'")
    from monta_megatron.emulation import CPU_RANKS_ARGUMENTS

    sys.path.insert(0, str(QUICKSTART))
    try:
        import prepare_text
    finally:
        sys.path.remove(str(QUICKSTART))
    texts = [b"Token %d travels to its experts and back. " % number * 20 for number in range(50)]
    data = ("--data-path", str(prepare_text.prepare(texts, tmp_path / "data")))
    training = (*TRAINING.split(), *CPU_RANKS_ARGUMENTS, *data)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()

    # Step 1: without an interruption.
    script = (str(SLURM / "train.sbatch"), str(QUICKSTART / "train.py"))
    job = slurm.submit(whole, *script, *training, RANKS_PER_NODE="2")
    log = complete(slurm, job, whole)
    assert printed_iterations(log) == list(range(1, ITERATIONS + 1))
    assert len(losses(whole)) == ITERATIONS

    # Step 2: with what Slurm sends to the batch script near the time limit.
    script = (
        *(str(SLURM / "train.sbatch"), str(Path(__file__).with_name("pausing_train.py"))),
        str(SIGNALLED_ITERATION),
    )
    checkpoints = CHECKPOINTS.split()
    job = slurm.submit(parts, *script, *training, *checkpoints, RANKS_PER_NODE="2")
    slurm.wait_until(job, lambda: len(losses(parts)) >= SIGNALLED_ITERATION, JOB_LIMIT_S)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    log = complete(slurm, job, parts)
    assert slurm.state(job)["Restarts"] == "1"
    assert f"job {job} is requeued" in log
    assert "successfully loaded checkpoint" in log
    assert printed_iterations(log) == list(range(1, ITERATIONS + 1))
    assert losses(parts) == losses(whole)


@pytest.mark.timeout(JOB_LIMIT_S)
def test_cancelled_job_leaves_no_process(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit(
        tmp_path, "--nodes=2", str(START), "--ranks-per-node", "2", "--", str(RANKS), "linger"
    )
    log = tmp_path / f"{job}.log"
    slurm.wait_until(
        job, lambda: log.exists() and log.read_text().count("lingers") == 4, JOB_LIMIT_S
    )
    # On each node: torchrun and two ranks with a child each; besides, the shells and srun.
    assert len(processes_with(SLURM_JOB_ID=job)) >= 10
    slurm.call("scancel", job)
    assert slurm.wait(job, 3 * KILL_WAIT_S)["JobState"] == "CANCELLED"
    slurm.wait_until(job, lambda: not processes_with(SLURM_JOB_ID=job), KILL_WAIT_S)


@pytest.mark.timeout(JOB_LIMIT_S)
def test_calibrate(slurm: Cluster, tmp_path: Path) -> None:
    arguments = ("--out", "cluster.yaml", "--budget-seconds", "1", "--nics-per-node", "1")
    script = (str(SLURM / "calibrate.sbatch"), *arguments)
    complete(slurm, slurm.submit(tmp_path, *script, RANKS_PER_NODE="2"), tmp_path)
    cluster = load_cluster(tmp_path / "cluster.yaml")
    assert (cluster.num_nodes, cluster.ranks_per_node) == (2, 2)


@pytest.mark.timeout(JOB_LIMIT_S)
def test_bench(slurm: Cluster, tmp_path: Path) -> None:
    sizes = "--experts 4 --top-k 2 --hidden 32 --tokens 16 --repeats 1"
    arguments = f"{sizes} --stock alltoall --chains alltoall_dedup --num-chunks 1 --phase forward"
    script = (str(SLURM / "bench.sbatch"), *arguments.split())
    log = complete(slurm, slurm.submit(tmp_path, *script, RANKS_PER_NODE="1"), tmp_path)
    assert "alltoall_dedup" in log


@pytest.mark.timeout(JOB_LIMIT_S)
def test_one_task_per_rank(slurm: Cluster, tmp_path: Path) -> None:
    srun = ("srun", "--nodes=2", "--ntasks-per-node=2", "bash", str(START))
    command = (*srun, "--ranks-per-node", "2", "--", str(RANKS))
    places = slurm.call(*command, "place").splitlines()
    # Rank, world size, local rank, local world size.
    expected = [[0, 4, 0, 2], [1, 4, 1, 2], [2, 4, 0, 2], [3, 4, 1, 2]]
    assert sorted(map(json.loads, places)) == expected


@pytest.mark.timeout(JOB_LIMIT_S)
def test_exit_status_of_a_rank_is_the_job_s(slurm: Cluster, tmp_path: Path) -> None:
    command = ("--nodes=2", str(START), "--ranks-per-node", "1", "--", str(RANKS), "fail")
    fields = slurm.wait(slurm.submit(tmp_path, *command), JOB_LIMIT_S)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "3:0")
