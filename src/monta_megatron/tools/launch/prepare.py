"""Read a run file and everything that it names, and check it with Megatron; start nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from monta_megatron.common import presets, strict_yaml
from monta_megatron.common.text import check_printable
from monta_megatron.common.units import counted
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.models.training_memory import TrainingMemory
from monta_megatron.planner.plan import Plan
from monta_megatron.tools.launch.arguments import (
    Arguments,
    Merged,
    check_batch,
    escaped,
    from_words,
    merge,
    replaced,
)
from monta_megatron.tools.launch.megatron_arguments import Answer
from monta_megatron.tools.launch.planning import plan_run
from monta_megatron.tools.launch.run_config import RunConfig

PRETRAIN_GPT = "${MEGATRON_LM_DIR}/pretrain_gpt.py"
# The arguments that a requeued job needs to continue where it was when its time was nearly up.
RESUMES_WITH = ("save", "load", "exit-signal-handler")
# Where `${NAME}` is replaced, in addition to `environment`.
SECTIONS = ("megatron", "script_arguments")
PATHS = ("model", "cluster", "script")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is known in full.

    Attributes:
        config: the configuration, with paths and variables resolved and everything merged.
        script: training script of every rank.
        arguments: Megatron's arguments.
        script_arguments: the script's own arguments, which follow them.
        directory: the run's own directory.
        plan: what the planner expects, or None.
        memory: of a rank, by the formula that ranks layouts; None without a plan.
        benefit: gain of an iteration over stock, or None where that is not known.
        megatron: version of the Megatron-Core that has checked the arguments; None if unchecked.
        notes: for the user, one line each.
        copies: name in the directory -> the file that is copied there.
    """

    config: RunConfig
    script: str
    arguments: Arguments
    script_arguments: Arguments
    directory: Path
    plan: Plan | None
    memory: TrainingMemory | None
    benefit: Benefit | None
    notes: tuple[str, ...]
    megatron: str | None = None
    copies: Mapping[str, str] = field(default_factory=dict)

    @property
    def lacks_to_resume(self) -> tuple[str, ...]:
        """The arguments without which a requeued job would start over."""
        return tuple(name for name in RESUMES_WITH if name not in self.arguments)

    def lines(self) -> Iterator[str]:
        """Layout, plan, notes and directory, a line each."""
        layout, plan = self.config.layout, self.plan
        sizes = ", ".join(
            f"{name.upper()} {getattr(layout, name)}" for name in ("tp", "ep", "etp", "pp", "cp")
        )
        nodes = counted(layout.nodes, "node")
        yield f"{nodes} x {counted(layout.ranks_per_node, 'rank')}: {sizes}"
        if plan is not None:
            yield (
                f"plan: {plan.chain} in {counted(plan.num_chunks, 'chunk')}, "
                f"{plan.predicted_us:,.0f} us per layer and micro-batch, predicted"
            )
            if self.benefit is not None:
                yield f"benefit: {self.benefit.text}"
        yield from (f"note: {note}" for note in self.notes)
        yield f"directory: {self.directory}"

    def document(self) -> dict[str, Any]:
        """The run for JSON."""
        plan = self.plan
        return {
            "name": self.config.name,
            "directory": str(self.directory),
            "script": self.script,
            "arguments": [
                word
                for arguments in (self.arguments, self.script_arguments)
                for argument in arguments.values()
                for word in argument.words
            ],
            "environment": {k: str(v) for k, v in self.config.environment.items()},
            "arguments_checked": self.megatron is not None,
            "plan": None
            if plan is None
            else {
                "chain": plan.chain,
                "num_chunks": plan.num_chunks,
                "predicted_us": plan.predicted_us,
                "reason": plan.reason,
                "rates": plan.rates,
            },
            "benefit": None if self.benefit is None else self.benefit.document(),
            "memory": None if self.memory is None else self.memory.document(),
            "notes": self.notes,
        }


def prepare(
    file: str,
    words: Sequence[str],
    directory: Path | None,
    dry_run: bool,
) -> Run:
    """Read, merge and plan.

    Args:
        file: the run file.
        words: arguments of Megatron from the command line.
        directory: directory of the run, or None for runs/NAME.
        dry_run: whether the script may be missing.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    file = str(presets.find("runs", file))
    directory, merged = read_run(file, words, directory)
    planned = plan_run(merged.config, merged.arguments, file)
    check_batch(merged.arguments, merged.config.layout.parallel.dp)
    script, script_notes = _script(merged.config.script, file, dry_run)
    return Run(
        config=replace(merged.config, script=script),
        script=script,
        arguments=merged.arguments,
        script_arguments=merged.script_arguments,
        directory=directory,
        plan=planned.plan,
        memory=planned.memory,
        benefit=planned.benefit,
        notes=(*merged.notes, *planned.notes, *script_notes),
    )


def read_run(file: str, words: Sequence[str], directory: Path | None = None) -> tuple[Path, Merged]:
    """Read and merge: the run's directory, its configuration and its arguments.

    Args:
        file: the path of the run file.
        words: arguments of Megatron from the command line.
        directory: directory of the run, or None for runs/NAME.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    config = strict_yaml.load(RunConfig, file)
    command_line = from_words(words)
    directory = free_directory(config.name, directory)
    check_printable(str(directory), "--run-directory")
    check_printable(os.path.abspath(file), "--config")
    config = _with_variables(config, file, {**os.environ, "RUN_DIRECTORY": str(directory)})
    config = _with_files(config, file)
    return directory, merge(config, file, command_line)


def free_directory(name: str, given: Path | None) -> Path:
    """The run's directory: one that does not exist yet, or is empty. Nothing is written.

    Raises:
        ValueError: the given one is not empty, or not a folder.
    """
    if given is not None:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise ValueError(f"--run-directory: got {given}, must be a new or an empty folder")
        return given.absolute()
    first = Path("runs", name).absolute()
    others = (first.with_name(f"{name}-{number}") for number in count(2))
    return next(folder for folder in chain([first], others) if not folder.exists())


def _with_variables(config: RunConfig, file: str, variables: Mapping[str, str]) -> RunConfig:
    """Replace `${NAME}`: in `environment` by the caller's variables, then elsewhere by both."""

    def section(name: str, known: Mapping[str, str]) -> dict[str, Any]:
        return {
            key: replaced(value, known, f"{file}: {name}.{key}")
            for key, value in getattr(config, name).items()
        }

    environment = section("environment", variables)
    known = {**variables, **{name: str(value) for name, value in environment.items()}}
    changes: dict[str, Any] = {name: section(name, known) for name in SECTIONS}
    for name in PATHS:
        changes[name] = replaced(getattr(config, name), known, f"{file}: {name}")
    return replace(config, environment=environment, **changes)


def _with_files(config: RunConfig, file: str) -> RunConfig:
    """Make paths absolute, which are relative to the run file, and find the presets."""
    folder = Path(file).absolute().parent
    files: dict[str, str] = {}
    try:
        if config.model is not None:
            files["model"] = os.path.abspath(presets.find("models", config.model, folder))
        if config.cluster is not None:
            files["cluster"] = os.path.abspath(presets.find("clusters", config.cluster, folder))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if config.script is not None:
        files["script"] = os.path.normpath(folder / config.script)
    return replace(config, **files)  # type: ignore[arg-type]


def to_run_file(config: RunConfig) -> str:
    """A resolved configuration as a run file that resolves to the same configuration."""
    changes: dict[str, Any] = {name: escaped(getattr(config, name)) for name in PATHS}
    for name in ("environment", *SECTIONS):
        changes[name] = {key: escaped(value) for key, value in getattr(config, name).items()}
    return strict_yaml.dump(replace(config, **changes))


def _script(script: str | None, file: str, dry_run: bool) -> tuple[str, list[str]]:
    checkout = os.environ.get("MEGATRON_LM_DIR")
    if script is None and checkout is not None:
        script = str(Path(checkout, "pretrain_gpt.py").absolute())
    problem = None
    if script is None:
        script, problem = (
            PRETRAIN_GPT,
            f"{file}: script: missing, must be given where MEGATRON_LM_DIR is not set; set it to a "
            "checkout of Megatron-LM, whose pretrain_gpt.py is then run",
        )
    elif not Path(script).is_file():
        problem = f"{file}: script: got {script}, must be a Python script that exists"
    if problem is not None and not dry_run:
        raise ValueError(problem)
    return script, [] if problem is None else [problem]


def checked(run: Run, force: bool = False) -> Run:
    """The run with the Megatron-Core version that checked it, and notes on what is in doubt.

    Args:
        run: the run.
        force: go on where Megatron's validation refuses the arguments taken together.

    Raises:
        ValueError: Megatron refuses an argument, named with the nearest one that exists, or all of
            them together.
    """
    answer = _ask(run)
    if answer.problem is not None:
        sources = [argument.source for argument in run.arguments.values()]
        where = "" if answer.position is None else f"{sources[answer.position]}: "
        raise ValueError(f"{where}{answer.problem}")
    notes = list(run.notes)
    if answer.unchecked is not None:
        notes.append(
            f"arguments not checked: {answer.unchecked}; pip install 'megatron-core[training]', or "
            "set MEGATRON_LM_DIR to a checkout of Megatron-LM"
        )
    if answer.doubt is not None:
        doubt = f"Megatron's validation refuses this, if ranks are as here: {answer.doubt}"
        if not force:
            raise ValueError(f"{doubt}; --force goes on where the ranks are not as here")
        notes.append(doubt)
    megatron = None if answer.unchecked is not None else answer.megatron
    return replace(run, megatron=megatron, notes=tuple(notes))


def _ask(run: Run) -> Answer:
    environment = {
        **os.environ,
        **{name: str(value) for name, value in run.config.environment.items()},
        "WORLD_SIZE": str(run.config.layout.parallel.world_size),
        "RANK": "0",
        "PYTHONWARNINGS": "ignore",
    }
    if environment.get("MONTA_CPU_RANKS") == "1":
        # The same default that CPU ranks set in the run itself.
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "monta_megatron.tools.launch.megatron_arguments"),
            os.path.dirname(run.script),
        ],
        input=json.dumps([argument.words for argument in run.arguments.values()]),
        # The stand-ins let Megatron be imported without a GPU, such as on a login node.
        env={**environment, "MONTA_CPU_RANKS": "1"},
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Answer(unchecked=f"Megatron's parser failed: {last}")
    return Answer(**json.loads(result.stdout))
