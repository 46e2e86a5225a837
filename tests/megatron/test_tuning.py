"""Candidates are tried in Megatron's own trainings: alike on all ranks, to the bits of one chain.

Four CPU ranks, whose exchanges cross nodes; top-2 makes sums of two terms, which have one result in
any order.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import NUM_RANKS, ForkedRanks
from test_training import BITWISE, data_prefix, losses_of, ranks, train

from monta_megatron.planner.tuning import TIME_LAG

__all__ = ["data_prefix", "ranks"]
SCRIPT = Path(__file__).with_name("train_tuning.py")


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training, and what is to be seen in it.

    Attributes:
        settings: arguments of Megatron and of the script.
        num_steps: of a window: three trials of each candidate.
        iterations: the winner runs in the last ones.
        num_shapes: layers with windows of their own, one after the other.
        skips: whether the loss scaler skips steps.
        num_workloads: numbers of exchanges that the steps of a window have.
        tolerance: of the losses, relative to those of the fixed chain.
    """

    settings: str
    num_steps: int = 6
    iterations: int = 11
    num_shapes: int = 1
    skips: bool = False
    num_workloads: int = 1
    tolerance: float = 0.0


TRAININGS = {
    # Interleaved stages, evaluation on the way, everything recomputed; the scaler skips the first
    # steps, and ranks of an exchange have experts to train or none.
    "pipeline": Training(
        settings="""
        --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1
        --expert-model-parallel-size 2 --global-batch-size 8 --eval-iters 1 --eval-interval 3
        --fp16 --initial-loss-scale 1e7 --hysteresis 1 --recompute-granularity full
        --recompute-method uniform --recompute-num-layers 1 --frozen experts
        """,
        skips=True,
    ),
    # One micro-batch at first, two after a thousand tokens, which are the first four steps.
    "replicas": Training(
        settings="""
        --expert-model-parallel-size 2 --num-layers 2 --eval-iters 0 --two-shapes --clip-grad 0
        --step-batch-size-schedule 0:8,1K:16
        --recompute-granularity selective --recompute-modules moe
        --ckpt-format torch_dist --no-save-rng --save {folder}/checkpoint --save-interval 1000
        """,
        iterations=18,
        num_shapes=2,
        num_workloads=2,
    ),
    # An optimizer without parameters beside that of the experts, and empty shards of theirs.
    "stub": Training(
        settings="""
        --expert-model-parallel-size 2 --num-layers 2 --global-batch-size 8 --eval-iters 0
        --frozen dense --use-distributed-optimizer
        """,
        num_steps=12,
        iterations=17,
    ),
    # Plain alltoall, and the best chain of tokens with its experts in 2 and in 4 chunks, over which
    # a weight's gradient is a sum.
    "experts_in_chunks": Training(
        settings="""
        --expert-model-parallel-size 2 --num-layers 2 --global-batch-size 16 --eval-iters 0
        --moe-monta-overlap-experts
        """,
        num_steps=9,
        iterations=14,
        tolerance=1e-6,
    ),
}
# Goes on with the checkpoint of "replicas": one exchange, of two nodes of two ranks.
RESUMED = Training(
    settings="""
    --expert-model-parallel-size 4 --num-layers 2 --eval-iters 0
    --step-batch-size-schedule 0:8,1K:16
    --ckpt-format torch_dist --no-load-rng --override-opt_param-scheduler --load {checkpoint}
    --moe-monta-ranks-per-node 2
    """,
    iterations=29,
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRAININGS)
def test_tuning(name: str, ranks: ForkedRanks, data_prefix: Path, tmp_path: Path) -> None:
    training = TRAININGS[name]
    train_twice(training, training.settings, ranks, data_prefix, tmp_path)
    checkpoint = tmp_path / "auto" / "monta" / "checkpoint"
    if checkpoint.exists():
        settings = RESUMED.settings.replace("{checkpoint}", str(checkpoint))
        (tmp_path / "resumed").mkdir()
        train_twice(RESUMED, settings, ranks, data_prefix, tmp_path / "resumed")


def train_twice(
    training: Training, settings: str, ranks: ForkedRanks, data_prefix: Path, folder: Path
) -> None:
    """Train with `auto` and with one chain, and compare."""
    of_ranks, losses = {}, {}
    options = {
        "auto": f"--moe-monta-ranks-per-node 1 --moe-monta-tune-steps {training.num_steps}",
        "fixed": BITWISE,
    }
    for name, more in options.items():
        if name == "fixed":
            settings = settings.replace("--moe-monta-overlap-experts", "")
        (folder / name).mkdir()
        arguments = f"{more} {settings} --train-iters {training.iterations}"
        record = train(ranks, "monta", arguments, data_prefix, folder / name, SCRIPT)
        losses[name] = losses_of(record)
        files = (folder / name / "monta" / f"tuning_{rank}.json" for rank in range(NUM_RANKS))
        of_ranks[name] = [json.loads(file.read_text()) for file in files]
    assert losses["auto"] == pytest.approx(losses["fixed"], rel=training.tolerance, abs=0)
    assert not any(each["noted"] for each in of_ranks["fixed"])
    check_ranks(training, of_ranks["auto"])


def check_ranks(training: Training, of_ranks: list[dict[str, Any]]) -> None:
    """Check what the ranks have noted: alike on an exchange, in phase on all."""
    candidates = defaultdict(set)
    for mine in of_ranks:
        assert mine["updated"][-1] and (False in mine["updated"]) is training.skips
        first = of_ranks[mine["exchange"][0]]
        assert (mine["noted"], mine["windows"]) == (first["noted"], first["windows"])
        # By shape and step, from its window on: what the micro-batches ran, of which some are
        # recomputed, or evaluate.
        choices = defaultdict(set)
        for shape, step, choice, is_training in mine["noted"]:
            window = mine["windows"][shape]
            begin, end = window["steps"]
            if begin <= step:
                choices[shape, step].add(choice)
            if is_training and begin <= step < end:
                candidates[step].add(window["candidates"].index(choice))
        assert {len(each) for each in choices.values()} == {1}
        ran = {key: each.pop() for key, each in choices.items()}
        check_windows(training, mine["windows"], ran)
    assert {len(each) for each in candidates.values()} == {1}
    assert len(candidates) == training.num_shapes * training.num_steps


def check_windows(
    training: Training, windows: list[dict[str, Any]], ran: dict[tuple[int, int], str]
) -> None:
    """Check that each candidate had its trials, that all have times, and that the best stays."""
    assert len(windows) == training.num_shapes
    begin = 0
    for shape, window in enumerate(windows):
        end = begin + training.num_steps
        assert window["steps"] == [begin, end]
        candidates, best = window["candidates"], window["best"]
        assert len(candidates) == training.num_steps // 3 and best in candidates
        trials = [ran[shape, step] for step in range(begin, end)]
        assert sorted(trials) == sorted(candidates * 3)
        assert all(us for _, us in window["trials"])
        if shape == 0:
            assert len({number for number, _ in window["trials"]}) == training.num_workloads
        begin = end + TIME_LAG
        after = {choice for (of, step), choice in ran.items() if of == shape and step >= begin}
        assert after == {best}
