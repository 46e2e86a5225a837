"""scripts/slurm/, start.sh and a requeued training on a Slurm of two nodes, with CPU ranks."""

import json
import re
from pathlib import Path

import pytest
import rank_programs
import yaml
from commands import needs_training
from interrupts import processes_with
from slurm_cluster import JOB_LIMIT_S, Cluster
from test_start_script import PLACES
from tuning_results import ALLTOALL, logged_windows

from monta_megatron.emulation import CPU_RANKS_ARGUMENTS
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.tools.launch import start
from monta_megatron.tools.launch.prepare import prepare
from monta_megatron.tools.launch.start import START, start_command

pytestmark = pytest.mark.timeout(3 * JOB_LIMIT_S)

SCRIPTS = Path(__file__).parents[2] / "scripts"
RANKS = rank_programs.__file__

ITERATIONS, SIGNALLED_ITERATION = 5, 2
TRAINING = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
    --seq-length 32 --max-position-embeddings 32 --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-router-topk 2
    --moe-token-dispatcher-type monta --moe-monta-chain alltoall_allgather
    --expert-model-parallel-size 2
    --micro-batch-size 2 --global-batch-size 4 --lr 5e-3 --seed 7
    --tokenizer-type NullTokenizer --vocab-size 256 --mock-data --split 100,0,0
    --train-iters {ITERATIONS} --eval-iters 0 --eval-interval 100 --log-interval 1
    --distributed-timeout-minutes 2 {" ".join(CPU_RANKS_ARGUMENTS)}
"""
# The format that starts no further processes to write with.
CHECKPOINTS = "--save {0} --load {0} --save-interval 100 --ckpt-format torch --exit-signal-handler"


def losses(record: Path) -> list[float]:
    """Unrounded, those of all starts of the job."""
    lines = record.read_text().splitlines() if record.exists() else []
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def printed_iterations(log: Path) -> list[int]:
    return [int(number) for number in re.findall(r"iteration +(\d+)/.* lm loss: ", log.read_text())]


@needs_training
def test_a_requeued_training_has_the_losses_of_an_unbroken_one(
    slurm: Cluster, tmp_path: Path
) -> None:
    whole, parts, run_file = (tmp_path / name for name in ("whole", "parts", "run.yaml"))

    # Step 1: without an interruption, by train.sbatch.
    script = (str(SCRIPTS / "slurm" / "train.sbatch"), str(SCRIPTS / "quickstart" / "train.py"))
    words = f"{TRAINING} --record {whole}".split()
    job, log = slurm.submit(tmp_path, *script, *words, RANKS_PER_NODE="1")
    slurm.complete(job, log)
    assert printed_iterations(log) == list(range(1, ITERATIONS + 1))
    assert len(losses(whole)) == ITERATIONS

    # Step 2: by run.sh, with what Slurm sends to the batch script near the time limit.
    says = "|".join(logged_windows(2 * [ALLTOALL]))
    run = {
        **{"name": "parts", "script": str(Path(__file__).with_name("pausing_train.py"))},
        **{"layout": {"nodes": 2, "ranks_per_node": 1}, "megatron": {}},
        "environment": {"PAUSES_AFTER": SIGNALLED_ITERATION, "SAYS": says},
    }
    run_file.write_text(yaml.safe_dump(run))
    words = f"{TRAINING} --record {parts} {CHECKPOINTS.format(tmp_path / 'saved')}".split()
    prepared = prepare(str(run_file), words, tmp_path / "run", dry_run=False)
    start.write(prepared)
    job = slurm.call(*start_command("sbatch", prepared)).strip()
    log = prepared.directory / "logs" / f"{job}.log"
    slurm.wait_until(job, lambda: len(losses(parts)) >= SIGNALLED_ITERATION)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    assert slurm.complete(job, log)["Restarts"] == "1"
    first, second = log.read_text().split(f"job {job} is requeued")
    assert "successfully loaded checkpoint" in second
    assert printed_iterations(log) == list(range(1, ITERATIONS + 1))
    assert losses(parts) == losses(whole)
    # The second start has the flags that the second tuning windows pinned.
    assert f"pinned by the second tuning windows: {ALLTOALL.flags}\n" in second
    assert f"monta: {ALLTOALL.name}" in second and f"monta: {ALLTOALL.name}" not in first


def test_cancelled_job_leaves_no_process(slurm: Cluster, tmp_path: Path) -> None:
    job, log = slurm.submit(
        tmp_path, "--nodes=2", str(START), "--ranks-per-node", "2", "--", RANKS, "linger"
    )
    slurm.wait_until(job, lambda: log.exists() and log.read_text().count("lingers") == 4)
    # On each node: torchrun and two ranks with a child each; besides, the shells and srun.
    assert len(processes_with(SLURM_JOB_ID=job)) >= 10
    slurm.call("scancel", job)
    assert slurm.wait(job)["JobState"] == "CANCELLED"
    slurm.wait_until(job, lambda: not processes_with(SLURM_JOB_ID=job))


def test_calibrate(slurm: Cluster, tmp_path: Path) -> None:
    arguments = ("--out", "cluster.yaml", "--budget-seconds", "1", "--nics-per-node", "1")
    script = str(SCRIPTS / "slurm" / "calibrate.sbatch")
    slurm.complete(*slurm.submit(tmp_path, script, *arguments, RANKS_PER_NODE="1"))
    cluster = load_cluster(tmp_path / "cluster.yaml")
    assert (cluster.num_nodes, cluster.ranks_per_node) == (2, 1)


def test_bench(slurm: Cluster, tmp_path: Path) -> None:
    sizes = "--experts 4 --top-k 2 --hidden 32 --tokens 16 --repeats 1"
    arguments = f"{sizes} --stock alltoall --chains alltoall_dedup --num-chunks 1 --phase forward"
    script = str(SCRIPTS / "slurm" / "bench.sbatch")
    job, log = slurm.submit(tmp_path, script, *arguments.split(), RANKS_PER_NODE="1")
    slurm.complete(job, log)
    assert "alltoall_dedup" in log.read_text()


def test_one_task_per_rank(slurm: Cluster) -> None:
    srun = ("srun", "--nodes=2", "--ntasks-per-node=2", "bash", str(START))
    printed = slurm.call(*srun, "--ranks-per-node", "2", "--", RANKS, "place")
    assert sorted(map(json.loads, printed.splitlines())) == PLACES


def test_exit_status_of_a_rank_is_the_job_s(slurm: Cluster, tmp_path: Path) -> None:
    command = f"--nodes=2 {START} --ranks-per-node 1 -- {RANKS} fail 1 3"
    job, _ = slurm.submit(tmp_path, *command.split())
    fields = slurm.wait(job)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "3:0")
