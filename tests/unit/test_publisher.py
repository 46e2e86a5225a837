"""What is watched reaches TensorBoard's files, W&B, the log and a file of JSON lines."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from monta_megatron.planner.online.drift import Change
from watched_iteration import CHANGE, WATCHED

from monta_megatron.integration import metrics
from monta_megatron.integration.metrics import Publisher, scalars_of
from monta_megatron.integration.options import Options

global_vars = pytest.importorskip(
    "megatron.training.global_vars", reason="needs megatron-core[training]"
)

LINE = (
    "iteration 108: exchange 46.5 ms (dispatch 10.0, combine 11.0, combine_backward 12.0, "
    "dispatch_backward 13.5), 0.25 GB between nodes, 1.5 GB inside, overload factor 1.25 (max "
    "1.50), slowest ranks 2 (imbalance 50%), 1.50x predicted (network 2.00x, node link 1.00x)"
)


class Said:
    """In place of a report."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, *lines: str) -> bool:
        self.lines += lines
        return True


def publish(options: Options, change: Change | None = None, ended: int = 109) -> Said:
    """What is said at the end of Megatron's iteration 109, our tenth, as the eighth is known."""
    said, watched = Said(), SimpleNamespace(latest=WATCHED, change=change)
    arguments = SimpleNamespace(curr_iteration=ended - 1, log_interval=10)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(metrics.dist, "get_process_group_ranks", lambda _: [0, 1, 2, 3]))
        enter(mock.patch.object(metrics.dist, "get_rank", lambda: 0))
        enter(mock.patch.object(metrics, "_num_published", 0))
        enter(mock.patch.object(global_vars, "_GLOBAL_ARGS", arguments))
        publisher = Publisher(watched, None, options, said)  # type: ignore[arg-type]
        publisher.after_iteration(8)
        watched.change = None
        arguments.curr_iteration += 1
        publisher.after_iteration(9)
    return said


def test_tensorboard_files_hold_what_was_watched(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    # As Megatron makes it.
    writer = SummaryWriter(log_dir=str(tmp_path), max_queue=1000)
    with mock.patch.object(global_vars, "_GLOBAL_TENSORBOARD_WRITER", writer):
        publish(Options())
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    read = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert {tag: [(each.step, each.value) for each in read[tag]] for tag in read} == {
        f"monta/{name}": [(108, scalar)] for name, scalar in scalars_of(WATCHED).items()
    }
    assert read["monta/exchange_ms"][0].value == 46.5
    assert read["monta/max_overload_factor"][0].value == 1.5
    assert read["monta/network_measured_over_predicted"][0].value == 2.0


def test_wandb_is_given_what_was_watched(tmp_path: Path) -> None:
    """By the real client, offline, after what Megatron has logged for the iteration before."""
    wandb = pytest.importorskip("wandb")
    settings = wandb.Settings(console="off", silent=True)
    run = wandb.init(mode="offline", project="test", dir=str(tmp_path), settings=settings)
    try:
        wandb.log({"lm loss": 5.0}, 108)
        with mock.patch.object(global_vars, "_GLOBAL_WANDB_WRITER", wandb):
            publish(Options())
        # The row of 108 is complete now.
        wandb.log({"lm loss": 4.0}, 109)
        summary = dict(run.summary)
    finally:
        run.finish()
    expected = {f"monta/{name}": scalar for name, scalar in scalars_of(WATCHED).items()}
    assert {name: summary.get(name) for name in expected} == expected
    assert (summary["_step"], summary["lm loss"]) == (108, 5.0)


def test_the_log_has_a_line_every_log_interval_if_asked_for() -> None:
    assert publish(Options()).lines == []
    assert publish(Options(watch_log=True)).lines == [LINE]
    # The next interval ends later.
    assert publish(replace(Options(), watch_log=True), ended=105).lines == []


def test_a_change_is_said_and_written(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    said = publish(Options(watch_out=str(folder)), CHANGE)
    (line,) = said.lines
    assert line == (
        "since iteration 6 the network takes 4x its usual time: stage alltoall between nodes, "
        "group rail; slowest are ranks 1, 3; auto plans with 25% of its rate from here on"
    )
    assert "auto" not in publish(Options(chain="alltoall", num_chunks=1), CHANGE).lines[0]
    document = json.loads((folder / "exchange_rank_0.jsonl").read_text())
    assert (document["iteration"], document["chain"]) == (108, "hierarchical_alltoall")
    assert document["change"]["ranks"] == [1, 3] and document["change"]["text"] in line
    publish(Options(watch_out=str(folder)))
    assert len((folder / "exchange_rank_0.jsonl").read_text().splitlines()) == 2


def test_outside_of_megatrons_training_loop() -> None:
    said: Any = Said()
    watched: Any = SimpleNamespace(latest=WATCHED, change=None)
    with mock.patch.object(metrics.dist, "get_process_group_ranks", lambda _: [0]):
        publisher = Publisher(watched, None, Options(watch_log=True), said)  # type: ignore[arg-type]
    publisher.after_iteration(8)
    assert len(said.lines) == 1 and said.lines[0].startswith("iteration 8: exchange 46.5 ms")
