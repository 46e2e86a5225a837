"""scripts/slurm/, start.sh and a requeued training on a Slurm of two nodes, with CPU ranks."""

import json
import re
from pathlib import Path
from socket import gethostname

import pytest
import rank_programs
import yaml
from commands import needs_training
from interrupts import processes_with
from slurm_cluster import JOB_LIMIT_S, NODE_NAMES, Cluster
from test_start_script import PLACES

from monta_megatron.emulation import CPU_RANKS_ARGUMENTS
from monta_megatron.integration.results import (
    FOLDER_VARIABLE,
    WindowResult,
    read_results,
    write_result,
)
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.tuning import TIME_LAG
from monta_megatron.tools.launch import start
from monta_megatron.tools.launch.prepare import prepare
from monta_megatron.tools.launch.start import START, start_command

pytestmark = pytest.mark.timeout(3 * JOB_LIMIT_S)

SCRIPTS = Path(__file__).parents[2] / "scripts"
RANKS = rank_programs.__file__

# Two tuning windows, the second of which begins as soon as the first has its result.
STEPS, STEPS_TO_SECOND = 6, 6 + TIME_LAG
SIGNALLED_ITERATION = STEPS_TO_SECOND + STEPS + TIME_LAG + 1
ITERATIONS = SIGNALLED_ITERATION + 3
TRAINING = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
    --seq-length 32 --max-position-embeddings 32 --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-router-topk 2
    --moe-token-dispatcher-type monta --moe-monta-tune-steps {STEPS}
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
    run = {
        **{"name": "parts", "script": str(Path(__file__).with_name("pausing_train.py"))},
        **{"layout": {"nodes": 2, "ranks_per_node": 1}, "megatron": {}},
        "environment": {"PAUSES_AFTER": SIGNALLED_ITERATION, "STEPS_TO_SECOND": STEPS_TO_SECOND},
    }
    run_file.write_text(yaml.safe_dump(run))
    words = f"{TRAINING} --record {parts} {CHECKPOINTS.format(tmp_path / 'saved')}".split()
    prepared = prepare(str(run_file), words, tmp_path / "run", dry_run=False)
    start.write(prepared)
    # A window of an earlier job, whose first start removes it: it would pin nothing.
    results = prepared.directory / "tuning"
    earlier = WindowResult(ranks=(0, 1), layers=0, window=1, step=0, flags=None)
    write_result(earlier, {FOLDER_VARIABLE: str(results)})
    job = slurm.call(*start_command("sbatch", prepared)).strip()
    log = prepared.directory / "logs" / f"{job}.log"
    slurm.wait_until(job, lambda: len(losses(parts)) >= SIGNALLED_ITERATION)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    assert slurm.complete(job, log)["Restarts"] == "1"
    first, second = log.read_text().split(f"job {job} is requeued")
    assert "successfully loaded checkpoint" in second
    assert printed_iterations(log) == list(range(1, ITERATIONS + 1))
    assert losses(parts) == losses(whole)
    # The second start has the flags that the second tuning window pinned, and no trials.
    windows = {result.window: result for result in read_results(results)}
    assert {window: result.step for window, result in windows.items()} == {1: 0, 2: STEPS_TO_SECOND}
    assert f"pinned by the second tuning windows: {windows[2].flags}\n" in second
    opened = ": tuning window of "
    assert (first.count(opened), second.count(opened)) == (2, 0)


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
    job, log = slurm.submit(tmp_path, script, *arguments, RANKS_PER_NODE="1")
    out = tmp_path / "cluster.yaml"
    if slurm.wait(job)["ExitCode"] != "0:0":
        # In a second the sizes are so small that what is measured may be refused.
        assert "refused" in log.read_text() and not out.exists()
        return
    slurm.complete(job, log)
    cluster = load_cluster(out)
    assert (cluster.num_nodes, cluster.ranks_per_node) == (2, 1)


def test_bench(slurm: Cluster, tmp_path: Path) -> None:
    sizes = "--experts 4 --top-k 2 --hidden 32 --tokens 16 --repeats 1"
    arguments = f"{sizes} --stock alltoall --chains alltoall_dedup --num-chunks 1 --phase forward"
    script = str(SCRIPTS / "slurm" / "bench.sbatch")
    job, log = slurm.submit(tmp_path, script, *arguments.split(), RANKS_PER_NODE="1")
    slurm.complete(job, log)
    assert "alltoall_dedup" in log.read_text()


@pytest.mark.parametrize("given", [None, gethostname()], ids=["not given", "given"])
def test_master_address(slurm: Cluster, tmp_path: Path, given: str | None) -> None:
    variables = {} if given is None else {"MASTER_ADDR": given}
    command = f"--nodes=2 {START} --ranks-per-node 2 -- {RANKS} address"
    job, log = slurm.submit(tmp_path, *command.split(), **variables)
    slurm.complete(job, log)
    # torchrun may complain behind them that the other node's has left first.
    said = log.read_text()
    assert said.splitlines().count(given or NODE_NAMES[0]) == 4, said


def refused(slurm: Cluster, folder: Path, command: str, **environment: str) -> str:
    """The log of a job that is refused."""
    job, log = slurm.submit(folder, *command.split(), **environment)
    fields = slurm.wait(job)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "2:0"), log.read_text()
    return log.read_text()


def test_a_loopback_address_serves_one_node_alone(slurm: Cluster, tmp_path: Path) -> None:
    command = f"{START} --ranks-per-node 2 -- {RANKS} address"
    said = refused(slurm, tmp_path, f"--nodes=2 {command}", MASTER_ADDR="127.0.0.1")
    assert said == (
        "start.sh: MASTER_ADDR: got '127.0.0.1', must be an address by which the 2 nodes reach the "
        "first one; in a job of Slurm it may be left out\n"
    )
    job, log = slurm.submit(tmp_path, "--nodes=1", *command.split(), MASTER_ADDR="localhost")
    slurm.complete(job, log)
    assert log.read_text().splitlines()[-2:] == 2 * ["localhost"]


def test_only_one_part_of_a_heterogeneous_job_starts(slurm: Cluster, tmp_path: Path) -> None:
    arguments = f"{START} --ranks-per-node 1 -- {RANKS} place"
    said = refused(slurm, tmp_path, f"--nodes=1 : --nodes=1 {arguments}")
    assert said == (
        "start.sh: heterogeneous job: got 2 parts, must be one, as only the first would start; "
        "start this script in one of them with `srun --het-group N bash start.sh ...`\n"
    )
    srun = f"salloc --nodes=1 : --nodes=1 srun --het-group 1 bash {arguments}"
    assert json.loads(slurm.call(*srun.split())) == [0, 1, 0, 1]


DEVICES = (
    "start.sh: CUDA_VISIBLE_DEVICES: got '0', must be a device for each of the 2 ranks of a node; "
    "ask for --gpus-per-node 2 in place of --gpus-per-task\n"
)


def test_a_task_that_does_not_see_all_devices_is_refused(slurm: Cluster, tmp_path: Path) -> None:
    """By one line, in srun's tasks and in torchrun's; it runs with the remedy of the line."""
    arguments = f"{START} --ranks-per-node 2 -- {RANKS} place"
    srun = f"srun --nodes=2 --ntasks-per-node=2 --kill-on-bad-exit {{}} bash {arguments}".format
    done = slurm.run(*srun("--gpus-per-task=1").split(), MONTA_CPU_RANKS="0")
    ours = [line for line in done.stderr.splitlines(True) if line.startswith("start.sh")]
    assert (done.returncode, done.stdout, ours) == (2, "", [DEVICES])
    printed = slurm.call(*srun("--gpus-per-node=2").split(), MONTA_CPU_RANKS="0")
    assert sorted(map(json.loads, printed.splitlines())) == PLACES
    # CPU ranks take no device.
    printed = slurm.call(*srun("--gpus-per-task=1").split())
    assert sorted(map(json.loads, printed.splitlines())) == PLACES

    per_task = f"--nodes=2 --ntasks-per-node=2 --gpus-per-task=1 {arguments}"
    said = refused(slurm, tmp_path, per_task, MONTA_CPU_RANKS="0")
    assert said.count("start.sh: ") == said.count(DEVICES) == 1


def test_one_task_per_rank(slurm: Cluster) -> None:
    srun = ("srun", "--nodes=2", "--ntasks-per-node=2", "bash", str(START))
    printed = slurm.call(*srun, "--ranks-per-node", "2", "--", RANKS, "place")
    assert sorted(map(json.loads, printed.splitlines())) == PLACES


def test_exit_status_of_a_rank_is_the_job_s(slurm: Cluster, tmp_path: Path) -> None:
    command = f"--nodes=2 {START} --ranks-per-node 1 -- {RANKS} fail 1 3"
    job, _ = slurm.submit(tmp_path, *command.split())
    fields = slurm.wait(job)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "3:0")
