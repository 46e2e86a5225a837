"""`monta compare`: trainings of one run file that differ in the dispatcher alone.

Trainings of a pair follow each other, and each dispatcher is first in every other pair, so a
machine that becomes slower slows all of them. Iterations of one training share its placement,
clocks and neighbours: the interval of a ratio is taken from the ratios of the pairs.
"""

import json
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from monta_megatron.common import presets, strict_yaml
from monta_megatron.common.files import write_whole
from monta_megatron.common.presets import commit, machine, versions
from monta_megatron.common.ranks import ended, why_ended
from monta_megatron.common.tables import table
from monta_megatron.common.units import size_text
from monta_megatron.tools.launch.prepare import free_directory
from monta_megatron.tools.launch.run_config import RunConfig
from monta_megatron.tools.training_log import RunLog, read_log

MONTA, STOCK, FLEX = "monta", "alltoall", "flex"
DISPATCHER = "--moe-token-dispatcher-type"
# Packages with the backends of Megatron's flex; one of them is enough to try it.
FLEX_PACKAGES = ("deep_ep", "transformer_engine")
# No checkpoint is read or written: every training begins with the seed's weights.
CHECKPOINTS = ("--save", "--load", "--async-save", "--non-persistent-save-interval")
# The first iterations, in which connections, buffers and plans are made.
NUM_WARMUP_ITERATIONS = 2
# Student's t for 95%, two-sided, by degrees of freedom; the last one for more.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NUM_PROGRESS_LINES = 5


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Trainings with one dispatcher against those with stock's.

    Attributes:
        dispatcher: value of Megatron's --moe-token-dispatcher-type.
        iteration_ms: time of an iteration, the median of the trainings' medians.
        trainings_ms: median of the iterations of each training.
        ratio: speedup over stock, the geometric mean of the pairs.
        ratio_low: its 95% interval; None for stock itself and for a single pair.
        ratio_high: likewise.
        max_loss_difference: largest relative difference of a loss from stock's of the same
            iteration; NaN if a loss is NaN, None if no iteration has both.
        peak_memory_bytes: most that a rank had allocated; None if the logs do not say.
        chain: chain that ran last; None for other dispatchers than monta.
    """

    dispatcher: str
    iteration_ms: float
    trainings_ms: list[float]
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    max_loss_difference: float | None
    peak_memory_bytes: float | None
    chain: str | None


def interleaved(dispatchers: Sequence[str], pairs: int) -> Iterator[tuple[int, str]]:
    """(pair, dispatcher) in the order of the trainings; every other pair is reversed."""
    for pair in range(pairs):
        for dispatcher in dispatchers if pair % 2 == 0 else dispatchers[::-1]:
            yield pair, dispatcher


def compare(dispatcher: str, stock: Sequence[RunLog], own: Sequence[RunLog]) -> Compared:
    """Compare the trainings of one dispatcher with stock's, pair by pair."""
    ratio, low, high = (1.0, None, None) if own is stock else speedup(stock, own)
    times_ms = [iteration_ms(log) for log in own]
    peaks = [log.peak_memory_bytes for log in own if log.peak_memory_bytes is not None]
    return Compared(
        dispatcher=dispatcher,
        iteration_ms=median(times_ms),
        trainings_ms=times_ms,
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        max_loss_difference=largest_difference([log.losses for log in own], stock[0].losses),
        peak_memory_bytes=max(peaks, default=None),
        chain=own[-1].chain,
    )


def iteration_ms(log: RunLog) -> float:
    """Median time of a training's iterations, without the warm-up; NaN if there is none."""
    timed = [ms for n, ms in log.times_ms.items() if n > NUM_WARMUP_ITERATIONS]
    return median(timed) if timed else math.nan


def speedup(
    base: Sequence[RunLog], other: Sequence[RunLog]
) -> tuple[float, float | None, float | None]:
    """Speedup of `other` over `base` and its 95% interval, from the two logs of each pair.

    Returns:
        The geometric mean of the pairs' ratios, and its interval by Student's t on the logarithms;
        a single pair has none.
    """
    pairs = zip(base, other, strict=True)
    logs = [math.log(iteration_ms(first) / iteration_ms(second)) for first, second in pairs]
    mean = fmean(logs)
    if len(logs) == 1:
        return math.exp(mean), None, None
    t = STUDENT_T[min(len(logs) - 1, len(STUDENT_T)) - 1]
    margin = t * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - margin), math.exp(mean + margin)


def largest_difference(
    trainings: Iterable[Mapping[int, float]], stock: Mapping[int, float]
) -> float | None:
    """Largest relative difference of a loss; NaN if one is NaN, None if no iteration has two.

    Args:
        trainings: iteration -> loss, of each training.
        stock: iteration -> loss.
    """
    differences = [
        0.0
        if losses[n] == stock[n]
        else abs(losses[n] - stock[n]) / max(abs(losses[n]), abs(stock[n]))
        for losses in trainings
        for n in losses.keys() & stock.keys()
    ]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=None)


def run_trainings(
    file: str,
    megatron: Sequence[str],
    *,
    iterations: int,
    pairs: int,
    directory: Path | None,
    force: bool,
    tell: Callable[[str], None],
) -> "ComparisonReport":
    """Run all trainings, one after the other, and write compare.json.

    Args:
        file: the run file, or a preset.
        megatron: arguments of Megatron for all trainings; --moe-monta-... for monta alone.
        iterations: of each training.
        pairs: trainings of each dispatcher.
        directory: folder of the run directories, new or empty; None for runs/NAME-compare.
        force: train although Megatron's own validation refuses the arguments.
        tell: called with each line for the user.

    Raises:
        ValueError: one line; something is wrong with the run, or monta or stock failed; trainings
            after it were not started.
    """
    # Step 1: read the run file.
    file = str(presets.find("runs", file))
    config = strict_yaml.load(RunConfig, file)
    if DISPATCHER in (word.partition("=")[0] for word in megatron):
        raise ValueError(f"{DISPATCHER}: got it after `--`, must be left out; all are compared")
    directory = free_directory(f"{config.name}-compare", directory)
    start = "torchrun" if config.layout.nodes == 1 else "srun"
    launch = [sys.executable, "-m", "monta_megatron", "launch", file, "--start", start]
    launch += ["--force"] if force else []

    # Step 2: train. A backend of flex may be installed and not run here.
    dispatchers, left_out = [MONTA, STOCK, FLEX], {}
    if not any(map(find_spec, FLEX_PACKAGES)):
        left_out[FLEX] = f"none of its backends is installed ({', '.join(FLEX_PACKAGES)})"
    logs: dict[str, list[RunLog]] = {}
    for pair, dispatcher in interleaved(dispatchers, pairs):
        if dispatcher in left_out:
            continue
        folder = directory / f"{dispatcher}-{pair + 1}"
        words = megatron_words(megatron, config.megatron, dispatcher, iterations)
        command = [*launch, "--run-directory", str(folder), "--", *words]
        tell(f"{folder.name} of {pairs} starts")
        own = logs.setdefault(dispatcher, [])
        try:
            own.append(_train(command, folder, iterations, tell))
        except ValueError as error:
            if dispatcher != FLEX:
                raise
            left_out[FLEX] = str(error)
            del logs[FLEX]

    # Step 3: compare.
    rows = [compare(name, logs[STOCK], own) for name, own in logs.items()]
    report = ComparisonReport(rows=rows, left_out=left_out, directory=directory)
    write_whole(directory / "compare.json", json.dumps(report.document(), indent=2) + "\n")
    return report


def megatron_words(
    given: Sequence[str], in_file: Collection[str], dispatcher: str, iterations: int
) -> list[str]:
    """Megatron's arguments of a training with one dispatcher.

    Args:
        given: arguments of the command line, for all trainings.
        in_file: names of the run file's arguments.
        dispatcher: the dispatcher.
        iterations: after how many it ends.
    """
    ours = "--moe-monta-"
    # Most of so few iterations would be those in which slower candidates run too.
    words, is_kept = [f"{ours}tune-steps", "0"] if dispatcher == MONTA else [], True
    for word in given:
        if word.startswith("--"):
            is_ours = word.startswith(ours) and dispatcher != MONTA
            is_kept = not is_ours and word.partition("=")[0] not in CHECKPOINTS
        words += [word] if is_kept else []
    # Not --train-iters: the learning rate and the data follow the whole training's schedule.
    words += [DISPATCHER, dispatcher, "--log-interval", "1", "--exit-interval", str(iterations)]
    for name in CHECKPOINTS:
        words += [name, "false"] if name.removeprefix("--") in in_file else []
    return words


def _train(
    command: Sequence[str], folder: Path, iterations: int, tell: Callable[[str], None]
) -> RunLog:
    """Run one training in its folder, with a line for every few iterations; returns its log.

    Raises:
        ValueError: `monta launch` refuses the run, or it failed.
    """
    # Set for SIGINT too: a shell starts background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryFile("w+", errors="replace") as messages:
        # A session of its own: Ctrl-C reaches only this process, which ends the ranks in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            for read in map(read_log, process.stdout):
                for n, ms in read.times_ms.items():
                    if n % max(1, iterations // NUM_PROGRESS_LINES) == 0:
                        loss = read.losses.get(n, math.nan)
                        tell(f"{folder.name}: iteration {n}: {ms:,.1f} ms, loss {loss:.6g}")
            status = process.wait()
        finally:
            process.terminate()
            process.wait()
        messages.seek(0)
        said = messages.read().splitlines()
    path = folder / "logs" / "run.log"
    if not path.is_file():
        raise ValueError(said[-1].removeprefix("monta launch: ") if said else ended(status))
    if status != 0:
        raise ValueError(f"{folder.name} failed, {why_ended(status, path)}; log: {path}")
    log = read_log(path.read_text(encoding="utf-8", errors="replace"))
    if math.isnan(iteration_ms(log)):
        raise ValueError(f"{path}: must have times of more than {NUM_WARMUP_ITERATIONS} iterations")
    return log


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """Report of all trainings.

    Attributes:
        rows: a row for each dispatcher.
        left_out: dispatcher -> why it is not compared.
        directory: folder of the run directories, DISPATCHER-PAIR.
    """

    rows: Sequence[Compared]
    left_out: Mapping[str, str]
    directory: Path

    def text(self) -> str:
        """The table and its notes."""
        columns = ("dispatcher", ">ms", ">ratio", ">95% interval", ">loss difference", ">memory")
        cells = [
            (
                row.dispatcher,
                f"{row.iteration_ms:,.1f}",
                f"{row.ratio:.2f}",
                None if row.ratio_low is None else f"{row.ratio_low:.2f} to {row.ratio_high:.2f}",
                None if row.max_loss_difference is None else f"{row.max_loss_difference:.2g}",
                size_text(row.peak_memory_bytes),
            )
            for row in self.rows
        ]
        lines = [table(columns, cells), ""]
        lines += [f"{row.dispatcher}: {row.chain}" for row in self.rows if row.chain is not None]
        lines += [f"{name} is left out: {why}" for name, why in self.left_out.items()]
        lines += [
            f"ms: median of an iteration, without the first {NUM_WARMUP_ITERATIONS} of a training",
            "ratio: alltoall's time over this one's, mean and interval over the pairs",
            "loss difference: the largest, relative; Megatron logs seven digits",
            f"directory: {self.directory}",
        ]
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """The JSON document, which has a text for a difference that is NaN."""
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            difference = row["max_loss_difference"]
            row["max_loss_difference"] = "nan" if difference != difference else difference
        return {
            "rows": rows,
            "left_out": dict(self.left_out),
            "directory": str(self.directory),
            "versions": versions(),
            "machine": machine(),
            "commit": commit(),
            "exit_status": 0,
        }
