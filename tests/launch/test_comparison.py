"""What `monta compare` computes and passes on, without a training: logs, rows, arguments."""

import math
from pathlib import Path

import pytest

from monta_megatron.common import strict_yaml
from monta_megatron.tools.compare.comparison import (
    arguments_for,
    compare,
    in_turn,
    largest_difference,
)
from monta_megatron.tools.launch.arguments import from_words
from monta_megatron.tools.launch.log import RunLog, read_log
from monta_megatron.tools.launch.run_config import RunConfig

FILE = str(Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml")
LOG = """
monta: alltoall in 1 chunk, EP 4 x ETP 1 over 2 nodes: as asked for
[node 1 rank 3]  iteration  1/ 9 | elapsed time per iteration (ms): 90.0 | lm loss: 5.5E+00 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.00 | reserved: 9.00
 iteration  2/ 9 | elapsed time per iteration (ms): 81.4 | number of skipped iterations: 1 |
[Rank 1] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: 3.00 | reserved: 9.00
 iteration  3/ 9 | elapsed time per iteration (ms): 80.0 | lm loss: nan |
"""


def test_a_log_is_read_by_iteration() -> None:
    log = read_log(LOG)
    assert log.times_ms == {1: 90.0, 2: 81.4, 3: 80.0}
    assert log.losses[1] == 5.5 and 2 not in log.losses and math.isnan(log.losses[3])
    assert (log.last_iteration, log.peak_memory_bytes) == (3, 3 * 2**20)
    assert log.chain == "alltoall in 1 chunk"


def test_a_log_without_anything() -> None:
    log = read_log("Traceback\n")
    assert (log.times_ms, log.losses, log.last_iteration) == ({}, {}, None)
    assert (log.peak_memory_bytes, log.chain) == (None, None)


def log_of(times_ms: list[float], losses: list[float]) -> RunLog:
    return RunLog(
        times_ms=dict(enumerate(times_ms, 1)),
        losses=dict(enumerate(losses, 1)),
        last_iteration=len(times_ms),
        peak_memory_bytes=None,
        chain=None,
    )


def test_rows_leave_out_what_warms_up() -> None:
    monta, stock = compare(
        [
            ("monta", log_of([900, 900, 10, 30, 20], [4, 2, 1, 1, 1])),
            ("alltoall", log_of([1, 1, 40, 50, 60], [4, 2, 1, 1, 0.5])),
        ]
    )
    assert (monta.median_ms, stock.median_ms) == (20, 50)
    assert (monta.ratio, stock.ratio) == (2.5, 1)
    assert monta.ratio_low is not None and monta.ratio_high is not None
    assert monta.ratio_low <= 2.5 <= monta.ratio_high
    assert (monta.max_loss_difference, stock.max_loss_difference) == (0.5, 0)


def test_what_the_logs_lack_is_none() -> None:
    monta, _ = compare([("monta", log_of([9, 9], [])), ("alltoall", log_of([9, 9, 9], [1.0]))])
    assert (monta.median_ms, monta.ratio, monta.max_loss_difference) == (None, None, None)


def test_a_loss_that_is_no_number_is_no_difference_of_0() -> None:
    difference = largest_difference([{1: 1.0, 2: math.nan}], {1: 1.0, 2: math.nan})
    assert difference is not None and math.isnan(difference)


def test_each_dispatcher_is_first_in_turn() -> None:
    order = [(0, "monta"), (0, "alltoall"), (1, "alltoall"), (1, "monta")]
    assert list(in_turn(("monta", "alltoall"), 2)) == order


@pytest.mark.parametrize("dispatcher", ["monta", "alltoall"])
def test_arguments_of_a_training(dispatcher: str) -> None:
    config = strict_yaml.load(RunConfig, FILE)
    words = ["--moe-monta-num-chunks", "2", "--lr", "1", "--save", "there", "--async-save"]
    values = arguments_for(config, from_words(words), dispatcher, iterations=20)
    expected = {
        **{"lr": "1", "moe-token-dispatcher-type": dispatcher, "log-interval": 1},
        # The file trains for 10 iterations, and both reads and writes checkpoints.
        **{"exit-interval": 20, "train-iters": 20, "save": False, "load": False},
    }
    # Those of ours are left out for another dispatcher later.
    of_monta = {"moe-monta-tune-steps": 0} if dispatcher == "monta" else {}
    assert values == expected | {"moe-monta-num-chunks": "2"} | of_monta


def test_a_tuning_that_is_asked_for_stays() -> None:
    config = strict_yaml.load(RunConfig, FILE)
    words = from_words(["--moe-monta-tune-steps", "5"])
    values = arguments_for(config, words, "monta", iterations=20)
    assert values["moe-monta-tune-steps"] == "5"


def test_a_long_training_keeps_its_schedule() -> None:
    config = strict_yaml.load(RunConfig, FILE)
    words = from_words(["--train-iters", "1000"])
    values = arguments_for(config, words, "monta", iterations=20)
    assert (values["train-iters"], values["exit-interval"]) == ("1000", 20)
