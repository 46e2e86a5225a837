"""Trainings of one run file that differ in the dispatcher alone: times, ratio, losses."""

import importlib.util
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from monta_megatron.common import presets, strict_yaml
from monta_megatron.common.files import write_whole
from monta_megatron.common.presets import commit, machine, versions
from monta_megatron.common.tables import table
from monta_megatron.common.units import size_text
from monta_megatron.integration.options import DISPATCHER_TYPE
from monta_megatron.tools.launch.arguments import (
    DISPATCHER,
    MONTA_PREFIX,
    SIZE,
    Argument,
    Arguments,
    from_mapping,
    from_words,
)
from monta_megatron.tools.launch.log import RunLog, read_log
from monta_megatron.tools.launch.prepare import Run, checked, free_directory, prepare
from monta_megatron.tools.launch.run_config import RunConfig
from monta_megatron.tools.launch.start import (
    Start,
    choose_start,
    run_and_log,
    self_contained,
    start_command,
    write,
)
from monta_megatron.tools.ratios import ratio_interval, ratio_of_medians

FLEX = "flex"
BACKEND = "moe-flex-dispatcher-backend"
CAPACITY = "moe-expert-rank-capacity-factor"
# Backend -> module and name in it that Megatron imports for it.
NEEDED = {
    "deepep": ("deep_ep", "Buffer"),
    "hybridep": ("deep_ep", "HybridEPBuffer"),
    "ncclep": ("transformer_engine.pytorch", "ep"),
}


def why_no_flex(arguments: Arguments, environment: Mapping[str, Any]) -> str | None:
    """Requirements that `flex` lacks here; None if nothing is known to be missing.

    Args:
        arguments: Megatron's, which name the backend.
        environment: of the ranks.
    """
    if str(environment.get("MONTA_CPU_RANKS", "")) == "1":
        return "the ranks are CPU ranks, and its backends are for GPUs"
    backend = _backend(arguments)
    if backend not in NEEDED:
        # Megatron's parser names those that it knows.
        return None
    module, name = NEEDED[backend]
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed, which its backend {backend} needs (--{BACKEND})"
    if backend == "ncclep" and not _has_value(arguments, CAPACITY):
        return f"--{CAPACITY} is not given, which its backend {backend} needs"
    # Not before: its import takes seconds.
    import torch

    if not torch.cuda.is_available():
        return "no GPU here"
    try:
        # As `from module import name`: the name may be a module, too.
        getattr(__import__(module, fromlist=[name]), name)
    except (ImportError, AttributeError, OSError) as error:
        return f"its backend {backend} needs {name} of {module}, which cannot be imported: {error}"
    return None


def _backend(arguments: Arguments) -> str:
    if _has_value(arguments, BACKEND) and not _has_value(arguments, "moe-enable-deepep"):
        return str(arguments[BACKEND].value)
    # Megatron's default.
    return "deepep"


def _has_value(arguments: Arguments, name: str) -> bool:
    return name in arguments and arguments[name].value is not False


STOCK = "alltoall"
# The first iterations of a training, in which connections, buffers and plans are made.
NUM_WARMUP_ITERATIONS = 2


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One dispatcher's trainings against stock's.

    Attributes:
        dispatcher: its name, as Megatron's argument has it.
        median_ms: time of an iteration, without those that warm up; None if the log has none.
        ratio: stock's median over this one; None where either is missing.
        ratio_low: its 95% interval over the iterations; None for stock itself.
        ratio_high: likewise.
        max_loss_difference: the largest difference of a loss from stock's of the same iteration,
            relative to the larger one; NaN if a loss is none, None if no iteration has both.
        peak_memory_bytes: the most that a rank had allocated; None if the log does not say.
        chain: of monta, in its own words.
    """

    dispatcher: str
    median_ms: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    max_loss_difference: float | None
    peak_memory_bytes: float | None
    chain: str | None


def in_turn(dispatchers: Sequence[str], pairs: int) -> Iterator[tuple[int, str]]:
    """(pair, dispatcher) in the order in which they train.

    A machine that slows down slows the later of two: each dispatcher is the first one in turn.
    """
    for pair in range(pairs):
        for dispatcher in dispatchers if pair % 2 == 0 else dispatchers[::-1]:
            yield pair, dispatcher


def compare(logs: Sequence[tuple[str, RunLog]]) -> tuple[Compared, ...]:
    """Each dispatcher against stock, in the order of their first trainings.

    Args:
        logs: (dispatcher, log) of every training; stock's `alltoall` is among them.
    """
    names = dict.fromkeys(name for name, _ in logs)
    by_name = {name: [log for other, log in logs if other == name] for name in names}
    stock = by_name[STOCK]
    stock_ms = np.array(timed_ms(stock))
    rows = []
    for name, mine in by_name.items():
        times_ms = np.array(timed_ms(mine))
        # Drawn together by repeat, so as many of one as of the other.
        num_both = min(len(times_ms), len(stock_ms))
        ratio = low = high = None
        if num_both:
            ratio = ratio_of_medians(stock_ms, times_ms)
            if name != STOCK:
                low, high = ratio_interval(stock_ms[:num_both], times_ms[:num_both])
        peaks = [log.peak_memory_bytes for log in mine if log.peak_memory_bytes is not None]
        rows.append(
            Compared(
                dispatcher=name,
                median_ms=float(np.median(times_ms)) if len(times_ms) else None,
                ratio=ratio,
                ratio_low=low,
                ratio_high=high,
                max_loss_difference=largest_difference(
                    [log.losses for log in mine], stock[0].losses
                ),
                peak_memory_bytes=max(peaks, default=None),
                chain=mine[-1].chain,
            )
        )
    return tuple(rows)


def timed_ms(logs: Iterable[RunLog]) -> list[float]:
    """The times of the iterations that count, of all logs."""
    return [ms for log in logs for n, ms in log.times_ms.items() if n > NUM_WARMUP_ITERATIONS]


def largest_difference(
    trainings: Iterable[Mapping[int, float]], stock: Mapping[int, float]
) -> float | None:
    """The largest relative difference of a loss; None if no iteration has two, NaN if one is NaN.

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


# No checkpoint is read or written: every training begins with the seed's weights.
CHECKPOINTS = ("save", "load", "async-save", "non-persistent-save-interval")
TUNE_STEPS = "moe-monta-tune-steps"


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training of the comparison.

    Attributes:
        dispatcher: value of Megatron's --moe-token-dispatcher-type.
        pair: which of its trainings, from 0.
        run: the run; its directory is one of its own.
        command: what starts it.
    """

    dispatcher: str
    pair: int
    run: Run
    command: tuple[str, ...]

    @property
    def log(self) -> Path:
        """Output of the ranks."""
        return self.run.directory / "logs" / "run.log"


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """All of them.

    Attributes:
        in_order: as they are to run.
        left_out: dispatcher -> why it is not compared.
        directory: the folder of their run directories.
    """

    in_order: tuple[Training, ...]
    left_out: dict[str, str]
    directory: Path


class TrainingFailed(Exception):
    """A training ended with a status that is not 0: (training, status)."""

    def __init__(self, training: Training, status: int) -> None:
        super().__init__(training, status)
        self.training, self.status = training, status


def prepare_trainings(
    file: str,
    words: Sequence[str],
    *,
    iterations: int,
    pairs: int,
    start: Start | None,
    directory: Path | None,
    force: bool,
) -> Trainings:
    """Read the run file once per dispatcher and check it; nothing is written or started.

    Args:
        file: the run file, or a preset.
        words: arguments of Megatron from the command line, for all trainings.
        iterations: of every training.
        pairs: how often each dispatcher trains.
        start: how; None for torchrun on one node and srun on several.
        directory: of the comparison; None for runs/NAME-compare.
        force: go on where Megatron's validation refuses the arguments taken together.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    # Step 1: what all trainings share.
    path = str(presets.find("runs", file))
    config = strict_yaml.load(RunConfig, path)
    given = from_words(words)
    if DISPATCHER in given:
        raise ValueError(f"--{DISPATCHER}: got it after `--`, must be left out; all are compared")
    folder = free_directory(f"{config.name}-compare", directory)

    def one(dispatcher: str, pair: int) -> Run:
        chosen = arguments_for(config, path, given, dispatcher, iterations)
        directory_of_run = folder / f"{dispatcher}-{pair + 1}"
        words_of_run = _words(chosen)
        return prepare(file, words_of_run, directory_of_run, dry_run=False)

    # Step 2: a run of each dispatcher, checked by Megatron.
    runs: dict[str, Run] = {}
    left_out = {}
    arguments = from_mapping(config.megatron, f"{path}: megatron") | given
    no_flex = why_no_flex(arguments, {**os.environ, **config.environment})
    for dispatcher in (DISPATCHER_TYPE, STOCK, FLEX):
        reason = no_flex if dispatcher == FLEX else None
        if reason is None:
            try:
                runs[dispatcher] = checked(one(dispatcher, 0), force)
            except ValueError as error:
                if dispatcher != FLEX:
                    raise
                reason = str(error)
        if reason is not None:
            left_out[dispatcher] = reason

    # Step 3: all of them, in the order in which they train.
    trainings = []
    for pair, dispatcher in in_turn(tuple(runs), pairs):
        first = runs[dispatcher]
        run = first if pair == 0 else replace(one(dispatcher, pair), megatron=first.megatron)
        nodes = run.config.layout.nodes
        how = choose_start(start or ("torchrun" if nodes == 1 else "srun"), run, dry_run=False)
        trainings.append(
            Training(
                dispatcher=dispatcher,
                pair=pair,
                run=self_contained(run),
                command=tuple(start_command(how, run)),
            )
        )
    return Trainings(in_order=tuple(trainings), left_out=left_out, directory=folder)


def train_all(trainings: Trainings) -> Iterator[tuple[Training, RunLog]]:
    """Run them one after the other; each is given out with its log when it has ended.

    Raises:
        ValueError: a run directory cannot be written.
        TrainingFailed: one failed; those after it are not started.
        KeyboardInterrupt: on a signal, after every rank has ended.
    """
    for training in trainings.in_order:
        write(training.run)
        with open(os.devnull, "wb") as nowhere:
            status = run_and_log(list(training.command), training.log, nowhere)
        if status != 0:
            raise TrainingFailed(training, status)
        yield training, read_log(training.log.read_text(encoding="utf-8", errors="replace"))


def arguments_for(
    config: RunConfig, file: str, given: Arguments, dispatcher: str, iterations: int
) -> Arguments:
    """Arguments after `--` of the run with one dispatcher."""
    in_file = from_mapping(config.megatron, f"{file}: megatron")
    asked = given.keys() | in_file.keys()
    # Our options stay in the file, where they are left out for other dispatchers.
    arguments = {
        key: argument
        for key, argument in given.items()
        if dispatcher == DISPATCHER_TYPE or not key.startswith(MONTA_PREFIX)
    }
    # Not --train-iters: the learning rate and the data follow the whole training's schedule.
    changes: dict[str, Any] = {DISPATCHER: dispatcher, "log-interval": 1}
    changes["exit-interval"] = iterations
    if dispatcher == DISPATCHER_TYPE and TUNE_STEPS not in asked:
        # Most of so few iterations would be those in which slower candidates run too.
        changes[TUNE_STEPS] = 0
    wanted = given.get("train-iters") or in_file.get("train-iters")
    if wanted is not None and wanted.value is not False and wanted.read(SIZE) < iterations:
        changes["train-iters"] = iterations
    for key in CHECKPOINTS:
        arguments.pop(key, None)
        if key in in_file:
            changes[key] = False
    source = "monta compare"
    return arguments | {
        key: Argument(name=key, value=value, source=source) for key, value in changes.items()
    }


def _words(arguments: Arguments) -> list[str]:
    return [
        word
        for argument in arguments.values()
        for word in ([f"--{argument.name}", "false"] if argument.value is False else argument.words)
    ]


COLUMNS = ("dispatcher", ">ms", ">ratio", ">95% interval", ">loss difference", ">peak memory")


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """Report of all trainings.

    Attributes:
        trainings: which ran.
        iterations: of each.
        logs: [trainings] each with its log.
    """

    trainings: Trainings
    iterations: int
    logs: Sequence[tuple[Training, RunLog]]

    @cached_property
    def rows(self) -> tuple[Compared, ...]:
        """A row for each dispatcher."""
        return compare([(training.dispatcher, log) for training, log in self.logs])

    def save(self) -> None:
        """Write the document into the folder of the trainings."""
        document = json.dumps(self.document(), indent=2)
        write_whole(self.trainings.directory / "compare.json", document + "\n")

    def text(self) -> str:
        """The table and its notes."""
        cells = [
            (
                row.dispatcher,
                None if row.median_ms is None else f"{row.median_ms:,.1f}",
                None if row.ratio is None else f"{row.ratio:.2f}",
                None if row.ratio_low is None else f"{row.ratio_low:.2f} to {row.ratio_high:.2f}",
                None if row.max_loss_difference is None else f"{row.max_loss_difference:.2g}",
                size_text(row.peak_memory_bytes),
            )
            for row in self.rows
        ]
        lines = [table(COLUMNS, cells), ""]
        lines += [f"{row.dispatcher}: {row.chain}" for row in self.rows if row.chain is not None]
        lines.append(
            f"ms: median of an iteration, {NUM_WARMUP_ITERATIONS} of {self.iterations} warm up; "
            "ratio: alltoall's over this one"
        )
        lines.append("loss difference: the largest, relative, of seven digits that are logged")
        return "\n".join([*lines, *self.notes(), f"directory: {self.trainings.directory}"])

    def notes(self) -> list[str]:
        """Missing values, and why."""
        said = [f"{name}: left out: {why}" for name, why in self.trainings.left_out.items()]
        for row in self.rows:
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

    def document(self) -> dict[str, Any]:
        """All of it for JSON, which knows no NaN: a loss that is none is a text."""
        return {
            "rows": [
                {key: _plain(value) for key, value in asdict(row).items()} for row in self.rows
            ],
            "iterations": self.iterations,
            "warmup_iterations": NUM_WARMUP_ITERATIONS,
            "left_out": self.trainings.left_out,
            "notes": self.notes(),
            "trainings": [
                {
                    "dispatcher": training.dispatcher,
                    "pair": training.pair + 1,
                    "directory": str(training.run.directory),
                    "notes": training.run.notes,
                    "times_ms": dict(log.times_ms),
                    "losses": {n: _plain(loss) for n, loss in log.losses.items()},
                }
                for training, log in self.logs
            ],
            "directory": str(self.trainings.directory),
            "versions": versions(),
            "machine": machine(),
            "commit": commit(),
            "exit_status": 0,
        }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
