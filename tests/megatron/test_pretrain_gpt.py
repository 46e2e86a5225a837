"""The unmodified pretrain_gpt.py of a Megatron-LM checkout: `monta` trains as `alltoall` does.

Four CPU ranks, torchrun, Megatron's own arguments, data, optimizers and checkpoints.
MEGATRON_LM_DIR names the checkout; Megatron is imported from it, not from an installed wheel.
"""

import importlib.util
import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from equal import assert_equal
from record_losses import parameters_of
from run_python import run_python

# The release, and the commit of branch main, that this was tested with.
RELEASE_TAG = "core_v0.19.0"
MAIN_COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"

NUM_RANKS = 4
ITERATIONS = 5
SAVED_ITERATION = 3
TORCHRUN_LIMIT_S = 280

MODEL = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --disable-bias-linear
    --seq-length 64 --max-position-embeddings 64 --num-experts 4 --moe-router-topk 2
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --seed 1234
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127
    --train-iters {ITERATIONS} --eval-iters 0 --eval-interval 1000 --log-interval 1
    --distributed-timeout-minutes 4
"""
TENSOR_PARALLEL = """
    --tensor-model-parallel-size 2 --sequence-parallel
    --expert-model-parallel-size 2 --expert-tensor-parallel-size 2
"""
SETTINGS = {
    "tensor_parallel": TENSOR_PARALLEL,
    "distributed_optimizer": f"{TENSOR_PARALLEL} --use-distributed-optimizer",
    "pipeline_parallel": "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
}


def checkout() -> Path:
    """The Megatron-LM checkout, or a skip that says how to get one."""
    folder = os.environ.get("MEGATRON_LM_DIR")
    if folder is None:
        pytest.skip(
            "needs a Megatron-LM checkout: git clone https://github.com/NVIDIA/Megatron-LM && "
            f"git -C Megatron-LM checkout {RELEASE_TAG} (or {MAIN_COMMIT}), then set "
            "MEGATRON_LM_DIR=$PWD/Megatron-LM"
        )
    if not (Path(folder) / "pretrain_gpt.py").is_file():
        raise ValueError(f"MEGATRON_LM_DIR: {folder} holds no pretrain_gpt.py")
    if importlib.util.find_spec("megatron.training") is None:
        # Not for the code, which the checkout has, but for all that it imports.
        pytest.skip("needs what Megatron trains with: pip install 'megatron-core[training]>=0.19'")
    return Path(folder).resolve()


def pretrain(script: list[str], arguments: str, folder: Path) -> str:
    """Train on CPU ranks; what the ranks printed.

    Args:
        script: pretrain_gpt.py of the checkout, or what runs it.
        arguments: Megatron's, besides the model's.
        folder: working directory, which gets caches.
    """
    from monta_megatron.emulation import CPU_RANKS_ARGUMENTS

    environment = {"MONTA_CPU_RANKS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS))
    words = (*script, *MODEL.split(), *arguments.split(), *CPU_RANKS_ARGUMENTS)
    result = run_python(*torchrun, *words, cwd=folder, limit_s=TORCHRUN_LIMIT_S, **environment)
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    return result.stdout


# The planner may choose a chain whose sums have another order; this one is equal to the bit.
DISPATCHERS = {
    "alltoall": "--moe-token-dispatcher-type alltoall",
    "monta": "--moe-token-dispatcher-type monta --moe-monta-chain alltoall_allgather",
}


class Run:
    """One training with recorded losses.

    Attributes:
        losses: iteration -> unrounded loss.
        grad_norms: iteration -> unrounded norm of the gradients.
        parameters: of each rank, by name, after the last iteration.
        output: what the ranks printed.
        checkpoints: where it saved, if it did.
    """

    def __init__(self, dispatcher: str, arguments: str, folder: Path) -> None:
        folder.mkdir()
        record = folder / "losses.jsonl"
        recorder = str(Path(__file__).with_name("record_losses.py"))
        self.checkpoints = folder / "checkpoints"
        self.output = pretrain(
            [recorder, str(record), str(checkout() / "pretrain_gpt.py")],
            f"{arguments} {DISPATCHERS[dispatcher]}",
            folder,
        )
        entries = [json.loads(line) for line in record.read_text().splitlines()]
        self.losses = {entry["iteration"]: entry["loss"] for entry in entries}
        self.grad_norms = {entry["iteration"]: entry["grad_norm"] for entry in entries}
        self.parameters = [torch.load(parameters_of(record, rank)) for rank in range(NUM_RANKS)]


# Name of the settings, dispatcher -> its training.
Runs = Callable[[str, str], Run]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trainings that several tests compare, each run when it is first asked for."""
    checkout()
    parent = tmp_path_factory.mktemp("pretrain_gpt")

    @cache
    def run(name: str, dispatcher: str) -> Run:
        folder = parent / f"{name}-{dispatcher}"
        # The checkpoint tests resume these.
        saves = f"--save {folder / 'checkpoints'} --save-interval {SAVED_ITERATION}"
        more = saves if name == "tensor_parallel" else ""
        return Run(dispatcher, f"{SETTINGS[name]} {more}", folder)

    return run


@pytest.mark.timeout(3 * TORCHRUN_LIMIT_S)
@pytest.mark.parametrize("name", SETTINGS)
def test_losses_equal_alltoall(name: str, runs: Runs) -> None:
    stock, ours = runs(name, "alltoall"), runs(name, "monta")
    assert list(stock.losses) == list(range(1, ITERATIONS + 1))
    assert stock.losses[ITERATIONS] < stock.losses[1], "the model does not learn"
    assert ours.losses == stock.losses
    assert ours.grad_norms == stock.grad_norms
    for mine, theirs in zip(ours.parameters, stock.parameters, strict=True):
        assert mine.keys() == theirs.keys()
        for parameter, value in mine.items():
            assert_equal(value, theirs[parameter], parameter)
    assert "monta: alltoall_allgather in" in ours.output, "the dispatcher did not say that it runs"


@pytest.mark.timeout(3 * TORCHRUN_LIMIT_S)
@pytest.mark.parametrize(("saved", "loaded"), [("monta", "alltoall"), ("alltoall", "monta")])
def test_checkpoint_changes_dispatcher(saved: str, loaded: str, runs: Runs, tmp_path: Path) -> None:
    before = runs("tensor_parallel", saved)
    tracker = before.checkpoints / "latest_checkpointed_iteration.txt"
    # The run went on to its end and saved there too; the resumed one starts from the middle.
    tracker.write_text(str(SAVED_ITERATION))
    resumed = Run(loaded, f"{TENSOR_PARALLEL} --load {before.checkpoints}", tmp_path / "resumed")
    uninterrupted = runs("tensor_parallel", "alltoall").losses
    assert resumed.losses == {
        iteration: loss for iteration, loss in uninterrupted.items() if iteration > SAVED_ITERATION
    }


@pytest.mark.timeout(3 * TORCHRUN_LIMIT_S)
def test_script_itself(runs: Runs, tmp_path: Path) -> None:
    """Nothing between torchrun and pretrain_gpt.py: it prints the losses that stock prints.

    Within 1e-6, as the planner may choose a chain whose sums have another order.
    """
    script = [str(checkout() / "pretrain_gpt.py")]
    arguments = f"{TENSOR_PARALLEL} --moe-token-dispatcher-type monta"
    printed = re.compile(r"iteration +(\d+)/.*? lm loss: (\S+)")

    def losses(output: str) -> dict[str, float]:
        return {iteration: float(loss) for iteration, loss in printed.findall(output)}

    found = losses(pretrain(script, arguments, tmp_path))
    assert len(found) == ITERATIONS
    assert found == pytest.approx(losses(runs("tensor_parallel", "alltoall").output), rel=1e-6)
