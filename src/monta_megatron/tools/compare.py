"""`monta compare`: trainings of one run file that differ in the dispatcher alone.

Trainings of a pair follow each other, and each dispatcher is first in every other pair, so a
machine that becomes slower slows all of them. Iterations of one training share its placement,
clocks and neighbours: the interval of a ratio is taken from the ratios of the pairs.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from monta_megatron.common import files, strict_yaml
from monta_megatron.common.errors import UserError
from monta_megatron.common.rules import require
from monta_megatron.common.text import counted, size_text, table
from monta_megatron.common.torchrun import why_ended
from monta_megatron.planner.model import Reader
from monta_megatron.tools.launch.prepare import checked, free_directory, prepare
from monta_megatron.tools.launch.run_config import DISPATCHER, RunConfig, from_words
from monta_megatron.tools.launch.start import choose_start, run_and_log, start_command, write
from monta_megatron.tools.training_log import NUM_WARMUP, TrainingLog, read_log

Tell = Callable[[str], None]

MONTA, STOCK, FLEX = "monta", "alltoall", "flex"
TUNE_STEPS = "moe-monta-tune-steps"
# Packages with the backends of Megatron's flex; one of them is enough to try it.
FLEX_PACKAGES = ("deep_ep", "transformer_engine")
# Student's t for 95%, two-sided, by degrees of freedom; the last one for more.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Trainings with one dispatcher against those with stock's.

    Attributes:
        dispatcher: value of Megatron's --moe-token-dispatcher-type.
        iteration_ms: time of an iteration, the median of the trainings' medians.
        trainings_ms: median of the iterations of each training.
        ratio: speedup over stock, the geometric mean of the pairs.
        interval: 95% interval of the ratio; None for stock itself and for a single pair.
        max_loss_difference: largest difference from stock's loss at the same iteration; None if no
            iteration has both.
        peak_memory_bytes: peak allocated memory of any rank; None if the logs do not say.
        chain: chain that ran last; None for other dispatchers than monta.
    """

    dispatcher: str
    iteration_ms: float
    trainings_ms: list[float]
    ratio: float
    interval: tuple[float, float] | None
    max_loss_difference: float | None
    peak_memory_bytes: float | None
    chain: str | None


def order_of(pair: int, names: Sequence[str]) -> Sequence[str]:
    """Names in the order of the trainings of a pair; every other pair is reversed."""
    return names if pair % 2 == 0 else names[::-1]


def compare(
    dispatcher: str,
    stock: Sequence[TrainingLog],
    own: Sequence[TrainingLog],
    num_warmup: int = NUM_WARMUP,
) -> Compared:
    """Compare the trainings of one dispatcher with stock's, pair by pair.

    Args:
        dispatcher: name of the dispatcher.
        stock, own: logs of stock's trainings, and of this dispatcher's in its first pairs or all.
        num_warmup: number of first iterations per training that are not timed.
    """
    stock = stock[: len(own)]
    stock_ms, times_ms = ([log.iteration_ms(num_warmup) for log in logs] for logs in (stock, own))
    ratio, interval = (1.0, None) if dispatcher == STOCK else speedup(stock_ms, times_ms)
    losses = ((log.losses.get(n), loss) for log in own for n, loss in stock[0].losses.items())
    return Compared(
        dispatcher=dispatcher,
        iteration_ms=median(times_ms),
        trainings_ms=times_ms,
        ratio=ratio,
        interval=interval,
        max_loss_difference=max((abs(x - y) for x, y in losses if x is not None), default=None),
        peak_memory_bytes=max(filter(None, (log.peak_memory_bytes for log in own)), default=None),
        chain=own[-1].chain,
    )


def speedup(
    base_ms: Sequence[float], other_ms: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """Speedup of the other trainings over the base, and its 95% interval, from the pairs.

    Returns:
        The geometric mean of the pairs' ratios, and its interval by Student's t on the logarithms;
        a single pair has none.
    """
    logs = [math.log(base / other) for base, other in zip(base_ms, other_ms, strict=True)]
    mean = fmean(logs)
    if len(logs) == 1:
        return math.exp(mean), None
    t = STUDENT_T[min(len(logs) - 1, len(STUDENT_T)) - 1]
    margin = t * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), (math.exp(mean - margin), math.exp(mean + margin))


def run_trainings(
    file: str,
    megatron: Sequence[str],
    *,
    iterations: int,
    pairs: int,
    directory: Path | None,
    force: bool,
    tell: Tell,
) -> "ComparisonReport":
    """Run all trainings, one after the other, and write compare.json after each pair.

    Args:
        file: the run file, or a preset.
        megatron: arguments of Megatron for all trainings; --moe-monta-... for monta alone.
        iterations: number of iterations per training.
        pairs: number of trainings per dispatcher, at least 1.
        directory: folder of the run directories, new or empty; None for runs/NAME-compare.
        force: train although Megatron's own validation refuses the arguments.
        tell: called with each line for the user.

    Raises:
        UserError: one line; something is wrong with the run, or monta or stock failed; trainings
            after it were not started.
    """
    # Step 1: read the run file.
    file = str(files.find_config("runs", file))
    config, given = strict_yaml.load(RunConfig, file), from_words(megatron)
    if DISPATCHER in given:
        raise UserError(f"--{DISPATCHER}: got it after `--`, must be left out; all are compared")
    tune_steps = Reader(given, "after --").size(TUNE_STEPS, default=0, minimum=0)
    num_warmup = NUM_WARMUP + tune_steps
    rule = f"be more than {num_warmup}, which are not timed: the first {NUM_WARMUP} and the trials"
    require(iterations > num_warmup, "--iterations", iterations, rule)
    directory = free_directory(f"{config.name}-compare", directory)

    # Step 2: train, and compare after each pair: a later failure loses nothing of it. A backend of
    # flex may be installed and not run here; in a container only its training can tell.
    left_out = {}
    if config.slurm.container is None and not any(map(find_spec, FLEX_PACKAGES)):
        left_out[FLEX] = f"none of its backends is installed ({', '.join(FLEX_PACKAGES)})"
    logs: dict[str, list[TrainingLog]] = {}
    for pair in range(pairs):
        for dispatcher in order_of(pair, (MONTA, STOCK, FLEX)):
            if dispatcher in left_out:
                continue
            folder = directory / f"{dispatcher}-{pair + 1}"
            words = megatron_words(megatron, dispatcher, iterations)
            try:
                log, fused = train(file, words, num_warmup, folder, force, tell)
                logs.setdefault(dispatcher, []).append(log)
            except UserError as error:
                if dispatcher != FLEX:
                    raise
                left_out[FLEX] = str(error)
        report = ComparisonReport(
            rows=[compare(name, logs[STOCK], own, num_warmup) for name, own in logs.items()],
            fused_permutation=fused,
            left_out=left_out,
            tune_steps=tune_steps,
            directory=directory,
        )
        document = json.dumps(report.document(), indent=2)
        files.write_whole(directory / "compare.json", f"{document}\n")
        tell(f"compare.json has {counted(pair + 1, 'pair')} of {pairs}")
    return report


def megatron_words(given: Sequence[str], dispatcher: str, iterations: int) -> list[str]:
    """Megatron's arguments of a training with one dispatcher; the last one of a name counts.

    Args:
        given: arguments of the command line, for all trainings.
        dispatcher: the dispatcher; with others than monta, `launch` leaves out monta's arguments.
        iterations: number of iterations after which the training ends.
    """
    return [
        # Most of so few iterations would be those in which slower candidates run too.
        *(f"--{TUNE_STEPS}", "0"),
        *given,
        *(f"--{DISPATCHER}", dispatcher),
        *("--log-interval", "1"),
        # Not --train-iters: the learning rate and the data follow the whole training's schedule.
        *("--exit-interval", str(iterations)),
        # No checkpoint is read or written: every training begins with the seed's weights.
        *("--save", "false", "--load", "false"),
        *("--async-save", "false", "--non-persistent-save-interval", "false"),
    ]


def train(
    file: str, words: Sequence[str], num_warmup: int, folder: Path, force: bool, tell: Tell
) -> tuple[TrainingLog, bool]:
    """Run one training in its folder, as `monta launch` does.

    Returns:
        The log, and whether the training permutes by Transformer Engine's fused kernels.

    A collective that hangs ends it after Megatron's --distributed-timeout-minutes.

    Raises:
        UserError: the run is refused, or it failed.
    """
    run = prepare(file, words, folder, dry_run=False)
    start = choose_start("torchrun" if run.config.layout.nodes == 1 else "srun", run, dry_run=False)
    run = checked(run, force)
    write(run)
    path = folder / "logs" / "run.log"
    tell(f"{folder.name} starts; log: {path}")
    status = run_and_log(start_command(start, run), path)
    if status != 0:
        raise UserError(f"{folder.name} failed, {why_ended(status, path)}; log: {path}")
    log = read_log(path)
    if len(log.times_ms) <= num_warmup:
        raise UserError(f"{path}: must have times of more than {num_warmup} iterations")
    if not all(map(math.isfinite, log.losses.values())):
        raise UserError(f"{path}: must have losses that are finite")
    tell(f"{folder.name}: {log.iteration_ms(num_warmup):,.1f} ms an iteration")
    return log, bool(run.arguments.get("moe-permute-fusion"))


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """Report of the pairs that are complete.

    Attributes:
        rows: a row for each dispatcher.
        left_out: dispatcher -> reason why it is not compared, or not in all pairs.
        tune_steps: iterations in which auto tries its candidates; with 0, auto runs the planner's
            choice.
        fused_permutation: whether the trainings, stock's too, permute by fused kernels.
        directory: folder of the run directories, DISPATCHER-PAIR.
    """

    rows: Sequence[Compared]
    left_out: Mapping[str, str]
    tune_steps: int
    fused_permutation: bool
    directory: Path

    def text(self) -> str:
        """The table and its notes."""
        columns = ("dispatcher", ">ms", ">ratio", ">95% interval", ">loss difference", ">memory")
        cells = [
            (
                row.dispatcher,
                f"{row.iteration_ms:,.1f}",
                f"{row.ratio:.2f}",
                row.interval and "{:.2f} to {:.2f}".format(*row.interval),
                None if row.max_loss_difference is None else f"{row.max_loss_difference:.2g}",
                size_text(row.peak_memory_bytes),
            )
            for row in self.rows
        ]
        lines = [table(columns, cells), ""]
        lines += [f"{row.dispatcher}: {row.chain}" for row in self.rows if row.chain is not None]
        lines += [f"{name} is left out: {why}" for name, why in self.left_out.items()]
        if not self.tune_steps:
            lines.append(f"trials: none, auto runs the planner's pick (--{TUNE_STEPS} 0)")
        if not self.fused_permutation:
            lines.append("stock ran without fused permutation (--moe-permute-fusion)")
        lines += [
            f"ms: median of an iteration, without the first {NUM_WARMUP + self.tune_steps}",
            "ratio: alltoall's time over this one's, mean and interval over the pairs",
            "memory: the most that a rank logged, in the first two iterations",
            "loss difference: the largest of an iteration; Megatron logs seven digits",
            f"versions: {files.versions_text(files.versions())}",
            f"directory: {self.directory}",
        ]
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "left_out": dict(self.left_out),
            "tune_steps": self.tune_steps,
            "fused_permutation": self.fused_permutation,
            "directory": str(self.directory),
            "versions": files.versions(),
            "machine": files.machine(),
            "commit": files.commit(),
        }
