"""Start one training of the quickstart, follow it, and read what it leaves."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepare_text import prepare, python_documentation
from trainings import NODES, RANKS_PER_NODE, Training, megatron_arguments

from monta_megatron.common.torchrun import why_ended
from monta_megatron.tools.training_log import TrainingLog, parse_log, read_log

FOLDER = Path(__file__).resolve().parents[2] / "runs" / "quickstart"
ENVIRONMENT = {
    "MONTA_CPU_RANKS": "1",
    # One thread per rank, or else the ranks compete for the cores.
    "OMP_NUM_THREADS": "1",
    # Megatron requires it for tensor parallelism.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def largest_difference(
    trainings: Iterable[Mapping[int, float]], stock: Mapping[int, float]
) -> float:
    """Largest relative difference of a loss from stock's of the same iteration.

    Args:
        trainings: iteration -> loss, of each training.
        stock: iteration -> loss.
    """
    return max(abs(losses[n] / loss - 1) for losses in trainings for n, loss in stock.items())


class QuickstartError(Exception):
    """A training failed, or did not do what the quickstart is there to show."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of one training.

    Attributes:
        losses: iteration -> loss, unrounded.
        dispatch: "dispatcher", the classes that ran, and "bytes" that all ranks sent: "inter" and
            "intra" as our chains count them, "network" as emulated NICs do; none without a count.
        log: what Megatron printed.
    """

    losses: dict[int, float]
    dispatch: dict[str, Any]
    log: TrainingLog


def train(
    name: str,
    training: Training,
    arguments: Sequence[str],
    iterations: int,
    inter_mbit: float | None = None,
) -> Run:
    """Train on four CPU ranks that are two nodes.

    Args:
        name: name of the log and the record.
        training: the model and its layout.
        arguments: Megatron's, of the dispatcher; they win over those of the training.
        iterations: of the training.
        inter_mbit: the rate between nodes on an emulated cluster; None for torchrun without one.

    Raises:
        QuickstartError: the training failed; the text holds the ranks' errors.
    """
    # For this process too, which imports Megatron to prepare the data.
    os.environ.update(ENVIRONMENT)
    FOLDER.mkdir(parents=True, exist_ok=True)
    log, record = FOLDER / f"{name}.log", FOLDER / f"{name}.jsonl"
    record.write_text("")
    launcher = ["monta_megatron.common.torchrun", "--standalone"]
    launcher += ["--nproc-per-node", str(NODES * RANKS_PER_NODE)]
    if inter_mbit is not None:
        launcher = ["monta_megatron", "emulate", "--nodes", str(NODES)]
        launcher += ["--ranks-per-node", str(RANKS_PER_NODE)]
        launcher += ["--inter-mbit", f"{inter_mbit:g}", "--"]
    data = prepare(python_documentation(), FOLDER / "data")
    command = [
        *(sys.executable, "-m", *launcher, str(Path(__file__).with_name("train.py"))),
        *("--record", str(record), *megatron_arguments(training, data, iterations), *arguments),
    ]
    print(f"{name:<12}  starting", flush=True)
    # A session of its own: Ctrl-C reaches only this process, which ends the ranks in order.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        with log.open("w", buffering=1) as output:
            for line in process.stdout:
                output.write(line)
                iteration = max(parse_log(line).times_ms, default=None)
                if iteration is not None and iteration % max(1, iterations // 10) == 0:
                    print(f"{name:<12}  iteration {iteration}/{iterations}", flush=True)
        status = process.wait()
    finally:
        # Also ends the ranks if this process is interrupted.
        process.terminate()
        process.wait()
    if status != 0:
        raise QuickstartError(f"{name} failed, {why_ended(status, log)}; log: {log}")
    *losses, dispatch = map(json.loads, record.read_text().splitlines())
    if len(losses) != iterations:
        raise QuickstartError(f"{name}: {len(losses)} losses recorded, must be {iterations}")
    return Run(
        losses={entry["iteration"]: entry["loss"] for entry in losses},
        dispatch=dispatch,
        log=read_log(log),
    )
