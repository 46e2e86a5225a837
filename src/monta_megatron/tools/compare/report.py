"""What a comparison found: the table, the lines below it, the JSON document."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from monta_megatron.common.presets import commit, machine, versions
from monta_megatron.common.tables import table
from monta_megatron.common.units import size_text
from monta_megatron.tools.compare.comparison import NUM_WARMUP_ITERATIONS, Compared
from monta_megatron.tools.compare.trainings import Training, Trainings
from monta_megatron.tools.launch.training_log import TrainingLog

COLUMNS = ("dispatcher", ">ms", ">ratio", ">95% interval", ">loss difference", ">peak memory")


def text(rows: Sequence[Compared], trainings: Trainings, iterations: int) -> str:
    """The table and what has to be known with it."""
    cells = [
        (
            row.dispatcher,
            None if row.median_ms is None else f"{row.median_ms:,.1f}",
            None if row.ratio is None else f"{row.ratio:.2f}",
            None if row.ratio_low is None else f"{row.ratio_low:.2f} to {row.ratio_high:.2f}",
            None if row.max_loss_difference is None else f"{row.max_loss_difference:.2g}",
            size_text(row.peak_memory_bytes),
        )
        for row in rows
    ]
    lines = [table(COLUMNS, cells), ""]
    lines += [f"{row.dispatcher}: {row.chain}" for row in rows if row.chain is not None]
    lines.append(
        f"ms: median of an iteration, {NUM_WARMUP_ITERATIONS} of {iterations} warm up; "
        "ratio: alltoall's over this one"
    )
    lines.append("loss difference: the largest, relative, of seven digits that are logged")
    return "\n".join([*lines, *notes(rows, trainings), f"directory: {trainings.directory}"])


def notes(rows: Sequence[Compared], trainings: Trainings) -> list[str]:
    """What is missing, and why."""
    said = [f"{name}: left out: {why}" for name, why in trainings.left_out.items()]
    for row in rows:
        lacking = [
            what
            for what, value in (
                ("time of an iteration", row.median_ms),
                ("loss", row.max_loss_difference),
                ("peak memory", row.peak_memory_bytes),
            )
            if value is None
        ]
        if lacking:
            said.append(f"{row.dispatcher}: its log has no {' and no '.join(lacking)}")
    return said


def document(
    rows: Sequence[Compared],
    trainings: Trainings,
    logs: Sequence[tuple[Training, TrainingLog]],
    iterations: int,
) -> dict[str, Any]:
    """All of it for JSON, which knows no NaN: a loss that is none is a text."""
    return {
        "rows": [{key: _plain(value) for key, value in asdict(row).items()} for row in rows],
        "iterations": iterations,
        "warmup_iterations": NUM_WARMUP_ITERATIONS,
        "left_out": trainings.left_out,
        "notes": notes(rows, trainings),
        "trainings": [
            {
                "dispatcher": training.dispatcher,
                "pair": training.pair + 1,
                "directory": str(training.run.directory),
                "notes": training.run.notes,
                "times_ms": dict(log.times_ms),
                "losses": {n: _plain(loss) for n, loss in log.losses.items()},
            }
            for training, log in logs
        ],
        "directory": str(trainings.directory),
        "versions": versions(),
        "machine": machine(),
        "commit": commit(),
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
