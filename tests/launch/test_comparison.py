"""Logs, rows and arguments of `monta compare`, without a training."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from monta_megatron.common.errors import UserError
from monta_megatron.core import Choice
from monta_megatron.integration.auto import result_line
from monta_megatron.planner.trials import Work
from monta_megatron.planner.tuning import TuningWindow
from monta_megatron.tools import compare as comparison
from monta_megatron.tools.compare import ComparisonReport, compare, megatron_words, speedup
from monta_megatron.tools.launch.run_config import from_words
from monta_megatron.tools.training_log import TrainingLog, parse_log

LOG = """
monta: alltoall in 1 chunk, EP 4 x ETP 1 over 2 nodes: as asked for
[node 1 rank 3]  iteration  1/ 9 | elapsed time per iteration (ms): 90.0 | lm loss: 5.5E+00 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.00 | reserved: 9.00
 iteration  2/ 9 | elapsed time per iteration (ms): 81.4 | number of skipped iterations: 1 |
[Rank 1] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: 3.00 | reserved: 9.00
 iteration  3/ 9 | elapsed time per iteration (ms): 80.0 | lm loss: nan |
"""


def test_a_log_is_read_by_iteration() -> None:
    log = parse_log(LOG)
    assert log.times_ms == {1: 90.0, 2: 81.4, 3: 80.0}
    assert log.losses[1] == 5.5 and 2 not in log.losses and math.isnan(log.losses[3])
    assert log.peak_memory_bytes == 3 * 2**20
    assert log.chain == "alltoall in 1 chunk"
    log = parse_log("Traceback\n")
    assert (log.times_ms, log.losses) == ({}, {})
    assert (log.peak_memory_bytes, log.chain) == (None, None)


def test_the_winner_of_a_window_is_the_chain() -> None:
    alltoall, winner = (Choice(chain=name, num_chunks=1) for name in ("alltoall", "allgather"))
    candidates = {alltoall: 300.0, winner: 200.0}
    window = TuningWindow(candidates=candidates, tokens=64, first=0, num_steps=6)
    for step in range(window.end):
        window.add_trial(step, Work(num_exchanges=2, tokens=128, max_tokens=64))
        window.add_time(step, 9_000 if window.candidate_of(step) == winner else 10_000)
    line = result_line([0, 1], window.result, busiest=1.25)
    assert parse_log(f"monta: {line}").chain == "allgather in 1 chunk"


def log_of(times_ms: list[float], losses: list[float]) -> TrainingLog:
    return TrainingLog(
        said={},
        times_ms=dict(enumerate(times_ms, 1)),
        losses=dict(enumerate(losses, 1)),
        peak_memory_bytes=None,
        chain=None,
    )


def test_rows_leave_out_the_warm_up() -> None:
    own = log_of([900, 900, 10, 30, 20], [4, 2, 1, 1, 1])
    row = compare("monta", [log_of([1, 1, 40, 50, 60], [4, 2, 1, 1, 0.5])], [own])
    assert (row.iteration_ms, row.ratio) == (20, 2.5)
    # Iterations of one training say nothing of the next one.
    assert row.interval is None
    # Nor do trials, in which slower candidates run too.
    stock = log_of([1, 1, 40, 50, 60], [])
    of_two = compare("monta", [stock], [own], num_warmup=4)
    assert (of_two.ratio, of_two.max_loss_difference) == (pytest.approx(3), None)
    assert (row.max_loss_difference, row.peak_memory_bytes) == (0.5, None)


def test_the_interval_comes_from_the_pairs() -> None:
    """Ratios of 1, 2 and 4: their logarithms have mean log 2 and deviation log 2."""
    ratio, interval = speedup([40, 40, 40], [40, 20, 10])
    margin = 4.303 * math.log(2) / math.sqrt(3)
    assert ratio == pytest.approx(2)
    assert interval == pytest.approx((2 / math.exp(margin), 2 * math.exp(margin)))
    # A training that is slower throughout, by chance, does not make the interval narrow.
    assert interval is not None and interval[0] < 1 < 4 < interval[1]


def test_arguments_of_a_training() -> None:
    given = "--lr 1 --save there --async-save --moe-monta-num-chunks 2 --log-interval=5"
    arguments = from_words(megatron_words(given.split(), "monta", 20))
    checkpoints = ("save", "load", "async-save", "non-persistent-save-interval")
    assert arguments == {
        **{"moe-monta-tune-steps": "0", "lr": "1", "moe-monta-num-chunks": "2"},
        # The last one of a name counts.
        **{"moe-token-dispatcher-type": "monta", "log-interval": "1", "exit-interval": "20"},
        # Taken back from the run file.
        **dict.fromkeys(checkpoints, False),
    }
    tuned = from_words(megatron_words(["--moe-monta-tune-steps", "6"], "monta", 20))
    assert tuned["moe-monta-tune-steps"] == "6"


@pytest.mark.parametrize("tune_steps", [0, 6])
def test_the_report_says_where_auto_has_no_trials(tmp_path: Path, tune_steps: int) -> None:
    own = log_of([9, 9, 9], [1.0])
    rows = [compare("monta", [own], [own])]
    report = ComparisonReport(
        rows=rows,
        left_out={},
        tune_steps=tune_steps,
        fused_permutation=tune_steps == 0,
        directory=tmp_path,
    )
    assert ("stock ran without fused permutation" in report.text()) == (tune_steps != 0)
    assert "versions: python " in report.text() and "torch" in report.text()
    assert ("trials: none, auto runs the planner's pick" in report.text()) == (not tune_steps)
    assert f"without the first {2 + tune_steps}" in report.text()
    assert report.document()["tune_steps"] == tune_steps


def test_what_is_complete_survives_a_training_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(
        file: str, words: object, num_warmup: int, folder: Path, *_: object
    ) -> tuple[TrainingLog, bool]:
        started.append(folder.name)
        folder.mkdir(parents=True)
        if folder.name in ("flex-2", "monta-3"):
            raise UserError("no memory")
        return log_of([9, 9, 9], [1.0]), True

    monkeypatch.setattr(comparison, "train", train)
    monkeypatch.setattr(comparison, "find_spec", lambda name: name == "deep_ep")
    started, told = list[str](), list[str]()
    flags: dict[str, Any] = {"iterations": 3, "pairs": 3, "directory": tmp_path, "force": False}
    with pytest.raises(UserError, match="no memory"):
        comparison.run_trainings("quickstart", [], **flags, tell=told.append)
    assert told == ["compare.json has 1 pair of 3", "compare.json has 2 pairs of 3"]
    document = json.loads((tmp_path / "compare.json").read_text())
    times_ms = {row["dispatcher"]: row["trainings_ms"] for row in document["rows"]}
    assert times_ms == {"monta": [9, 9], "alltoall": [9, 9], "flex": [9]}
    assert document["left_out"] == {"flex": "no memory"}
    # Each is first in every other pair.
    assert " ".join(started) == "monta-1 alltoall-1 flex-1 flex-2 alltoall-2 monta-2 monta-3"
