"""The unmodified pretrain_gpt.py of a Megatron-LM checkout: `monta` trains as `alltoall` does.

Four CPU ranks, torchrun, Megatron's own arguments, data, optimizers and checkpoints.
MEGATRON_LM_DIR names the checkout; Megatron is imported from it, not from an installed wheel.
"""

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from checkpoints import stored
from commands import needs_training
from run_python import run_python

from monta_megatron.emulation import CPU_RANKS_ARGUMENTS

# The release, and the commit of branch main, that this was tested with.
RELEASE_TAG = "core_v0.19.0"
MAIN_COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"

NUM_RANKS = 4
ITERATIONS = 5
SAVED_ITERATION = 3
TORCHRUN_LIMIT_S = 280

pytestmark = [pytest.mark.timeout(3 * TORCHRUN_LIMIT_S), needs_training]

MODEL = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --disable-bias-linear
    --seq-length 64 --max-position-embeddings 64 --num-experts 4 --moe-router-topk 2
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --seed 1234
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127
    --train-iters {ITERATIONS} --eval-iters 0 --eval-interval 1000 --log-interval 1
    --distributed-timeout-minutes 4 --save-interval {SAVED_ITERATION}
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
DISPATCHERS = {
    "alltoall": "--moe-token-dispatcher-type alltoall",
    # Equal to the bit.
    "monta": "--moe-token-dispatcher-type monta --moe-monta-chain alltoall_allgather",
    # The planner may choose a chain whose sums have another order.
    "auto": "--moe-token-dispatcher-type monta",
}


@cache
def script() -> Path:
    """The checkout's pretrain_gpt.py, or a skip that says how to get one."""
    folder = os.environ.get("MEGATRON_LM_DIR")
    if folder is None:
        pytest.skip(
            "needs a Megatron-LM checkout: git clone https://github.com/NVIDIA/Megatron-LM && "
            f"git -C Megatron-LM checkout {RELEASE_TAG} (or {MAIN_COMMIT}), then set "
            "MEGATRON_LM_DIR=$PWD/Megatron-LM"
        )
    path = Path(folder).resolve() / "pretrain_gpt.py"
    if not path.is_file():
        raise ValueError(f"MEGATRON_LM_DIR: {folder} holds no pretrain_gpt.py")
    return path


class Run:
    """One training, by nothing but torchrun and pretrain_gpt.py.

    Attributes:
        losses: iteration -> loss, with the seven digits that Megatron prints.
        output: what the ranks printed.
        checkpoints: where it saved, in the middle and at its end.
        tensors: of the last checkpoint, weights and state of the optimizer, in bytes.
    """

    def __init__(self, dispatcher: str, arguments: str, folder: Path) -> None:
        self.checkpoints = folder / "checkpoints"
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {NUM_RANKS}".split()
        words = f"{MODEL} {arguments} {DISPATCHERS[dispatcher]} --save {self.checkpoints}".split()
        # A skip leaves no folder behind: the next test asks for the same training.
        command = [*torchrun, script(), *words, *CPU_RANKS_ARGUMENTS]
        folder.mkdir()
        done = run_python(
            *command,
            cwd=folder,
            limit_s=TORCHRUN_LIMIT_S,
            MONTA_CPU_RANKS="1",
            PYTHONDONTWRITEBYTECODE="1",
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        self.output = done.stdout
        printed = re.findall(r"iteration +(\d+)/.*? lm loss: (\S+)", done.stdout)
        self.losses = {int(iteration): float(loss) for iteration, loss in printed}
        # Objects, such as the arguments, have no offset in a tensor.
        pieces = stored(self.checkpoints).items()
        self.tensors = {name: piece for name, piece in pieces if not name.endswith(" None")}


# Name of the settings, dispatcher -> its training.
Runs = Callable[[str, str], Run]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trainings that several tests compare, each run when it is first asked for."""
    parent = tmp_path_factory.mktemp("pretrain_gpt")
    return cache(lambda name, kind: Run(kind, SETTINGS[name], parent / f"{name}-{kind}"))


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_weights_and_optimizer_equal_alltoalls(name: str, runs: Runs) -> None:
    stock, ours = runs(name, "alltoall"), runs(name, "monta")
    assert list(stock.losses) == list(range(1, ITERATIONS + 1))
    assert stock.losses[ITERATIONS] < stock.losses[1], "the model does not learn"
    assert ours.losses == stock.losses
    assert any("exp_avg" in piece for piece in stock.tensors)
    assert ours.tensors == stock.tensors
    assert "monta: alltoall_allgather in" in ours.output, "the dispatcher did not say that it runs"


@pytest.mark.parametrize(("saved", "loaded"), [("monta", "alltoall"), ("alltoall", "monta")])
def test_checkpoint_changes_dispatcher(saved: str, loaded: str, runs: Runs, tmp_path: Path) -> None:
    before, whole = runs("tensor_parallel", saved), runs("tensor_parallel", "alltoall")
    # The run went on to its end and saved there too; the resumed one starts from the middle.
    tracker = before.checkpoints / "latest_checkpointed_iteration.txt"
    tracker.write_text(str(SAVED_ITERATION))
    resumed = Run(loaded, f"{TENSOR_PARALLEL} --load {before.checkpoints}", tmp_path / "resumed")
    # The loss that Megatron prints for the second iteration after a start is the mean of both.
    first = SAVED_ITERATION + 1
    assert list(resumed.losses) == list(range(first, ITERATIONS + 1))
    assert resumed.losses[first] == whole.losses[first]
    assert resumed.tensors == whole.tensors


def test_the_planner_chooses(runs: Runs) -> None:
    stock, ours = runs("tensor_parallel", "alltoall"), runs("tensor_parallel", "auto")
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6)
