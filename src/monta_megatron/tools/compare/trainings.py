"""The trainings that are compared: one run file, prepared once for each dispatcher and pair."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monta_megatron.common import presets, strict_yaml
from monta_megatron.integration.options import DISPATCHER_TYPE
from monta_megatron.tools.compare.comparison import STOCK, in_turn
from monta_megatron.tools.compare.flex import FLEX, why_no_flex
from monta_megatron.tools.launch import run_directory
from monta_megatron.tools.launch.arguments import (
    DISPATCHER,
    MONTA_PREFIX,
    SIZE,
    Argument,
    Arguments,
    from_mapping,
    from_words,
)
from monta_megatron.tools.launch.check import checked
from monta_megatron.tools.launch.prepare import Run, free_directory, prepare
from monta_megatron.tools.launch.run_config import RunConfig
from monta_megatron.tools.launch.start import Start, choose_start, run_and_log, start_command
from monta_megatron.tools.launch.training_log import TrainingLog, read_log

# No checkpoint is read or written: every training begins with the seed's weights.
CHECKPOINTS = ("save", "load", "async-save", "non-persistent-save-interval")
# Who gives one of them wants a tuning in the trainings.
TUNING = {"moe-monta-tune-steps", "moe-monta-plan-out"}


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
        """What the ranks print."""
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
    ignore_memory: bool,
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
        ignore_memory: whether a run may hold more than a rank has.

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
        return prepare(
            file, words_of_run, directory_of_run, dry_run=False, ignore_memory=ignore_memory
        )

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
                run=run_directory.self_contained(run),
                command=tuple(start_command(how, run)),
            )
        )
    return Trainings(in_order=tuple(trainings), left_out=left_out, directory=folder)


def train_all(trainings: Trainings) -> Iterator[tuple[Training, TrainingLog]]:
    """Run them one after the other; each is given out with its log when it has ended.

    Raises:
        ValueError: a run directory cannot be written.
        TrainingFailed: one failed; those after it are not started.
        KeyboardInterrupt: on a signal, after every rank has ended.
    """
    for training in trainings.in_order:
        run_directory.write(training.run)
        with open(os.devnull, "wb") as nowhere:
            status = run_and_log(list(training.command), training.log, nowhere)
        if status != 0:
            raise TrainingFailed(training, status)
        yield training, read_log(training.log.read_text(encoding="utf-8", errors="replace"))


def arguments_for(
    config: RunConfig, file: str, given: Arguments, dispatcher: str, iterations: int
) -> Arguments:
    """What follows `--` of the run with one dispatcher."""
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
    if dispatcher == DISPATCHER_TYPE and not asked & TUNING:
        # Most of so few iterations would be those in which slower candidates run too.
        changes["moe-monta-tune-steps"] = 0
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
