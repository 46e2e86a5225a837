"""Start one training of the quickstart, follow it, and read what it leaves."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import ShowProgress, progress
from trainings import NODES, RANKS_PER_NODE

from monta_megatron.common.ranks import cause_of
from monta_megatron.tools.training_log import RunLog, read_log

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runs" / "quickstart"


class QuickstartError(Exception):
    """A training failed, or did not do what the quickstart is there to show."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one training left.

    Attributes:
        dispatcher: "monta" or "alltoall".
        losses: unrounded, one per iteration.
        dispatch: "dispatcher", "chain" and "num_chunks", each the list of distinct values over
            layers and ranks; "bytes" sent by resource, over all ranks, as the chain counts them;
            "network_bytes" that the emulated NICs counted, or None.
        routing: a hash of all tokens' experts per iteration, if they were recorded.
        log: what Megatron printed.
        seconds: from start to end.
    """

    dispatcher: str
    losses: list[float]
    dispatch: dict[str, Any]
    routing: list[str]
    log: RunLog
    seconds: float


def train(
    name: str,
    dispatcher: Sequence[str],
    arguments: Sequence[str],
    iterations: int,
    inter_mbit: float | None = None,
) -> Run:
    """Train with one dispatcher on four CPU ranks that are two nodes.

    Args:
        name: name of the log and the record.
        dispatcher: the arguments that choose it.
        arguments: all others; of one that is given twice, the last one counts.
        iterations: iterations of the training, for the lines of progress.
        inter_mbit: the rate between nodes on an emulated cluster; None for torchrun without one.

    Raises:
        QuickstartError: the training failed; the text holds the ranks' errors.
    """
    log, record = FOLDER / f"{name}.log", FOLDER / f"{name}.jsonl"
    record.write_text("")
    launcher = ["-m", "monta_megatron.common.torchrun", "--standalone"]
    launcher += ["--nproc-per-node", str(NODES * RANKS_PER_NODE)]
    if inter_mbit is not None:
        launcher = ["-m", "monta_megatron", "emulate", "--nodes", str(NODES)]
        launcher += ["--ranks-per-node", str(RANKS_PER_NODE), "--inter-mbit", f"{inter_mbit:g}"]
        launcher += ["--"]
    command = [
        *(sys.executable, *launcher),
        *(str(Path(__file__).with_name("train.py")), "--record", str(record)),
        *dispatcher,
        *arguments,
    ]
    start = time.monotonic()
    with log.open("w") as output:
        # A session of its own: Ctrl-C reaches only this process, which ends the ranks in order.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _follow(process, record, progress(name, iterations))
        finally:
            # Also ends the ranks if this process is interrupted.
            process.terminate()
            process.wait()
    entries = _read_record(record)
    if process.returncode != 0:
        raise QuickstartError(f"training with {name} failed\n{_why(log)}\nlog: {log}")
    return Run(
        dispatcher=dispatcher[1],
        losses=[entry["loss"] for entry in entries if "loss" in entry],
        dispatch=entries[-1],
        routing=[entry["routing"] for entry in entries if "routing" in entry],
        log=read_log(log.read_text(errors="replace")),
        seconds=time.monotonic() - start,
    )


def _follow(process: subprocess.Popen[bytes], record: Path, show: ShowProgress) -> None:
    finished = 0
    running = True
    while running:
        # Polled before the record is read, so that its last lines are not missed.
        running = process.poll() is None
        losses = [entry["loss"] for entry in _read_record(record) if "loss" in entry]
        if len(losses) > finished:
            finished = len(losses)
            show(finished, losses[-1])
        if running:
            time.sleep(0.2)


def _read_record(record: Path) -> list[dict[str, Any]]:
    """What train.py has written so far."""
    # A line that is still being written has no end yet.
    lines = record.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _why(log: Path) -> str:
    """The error that ended the ranks; the log's end where there is none."""
    lines = log.read_text(errors="replace").splitlines()
    return cause_of(lines) or "\n".join(lines[-5:])
