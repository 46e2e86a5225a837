"""Read a run file and everything that it names, and check it with Megatron; start nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from monta_megatron.chains import CHAINS, check_chain, chunks_of
from monta_megatron.common import files, strict_yaml
from monta_megatron.common.errors import UserError
from monta_megatron.common.text import counted
from monta_megatron.integration.options import AUTO, DISPATCHER_TYPE
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import PARALLEL_ARGUMENTS
from monta_megatron.planner.model import Reader, model_of
from monta_megatron.planner.plan import NUM_CHUNKS
from monta_megatron.tools.launch.megatron_arguments import Answer
from monta_megatron.tools.launch.run_config import (
    CLUSTER,
    DISPATCHER,
    Arguments,
    RunConfig,
    from_words,
    merge,
    replaced,
    words_of,
)
from monta_megatron.tools.plan.request import Planned, PlanRequest, plan_request

# Variable that names a checkout of Megatron-LM; where it is not set, it is left to the script.
CHECKOUT = "MEGATRON_LM_DIR"
UNRESOLVED = f"${{{CHECKOUT}}}/"
# The arguments that a requeued job needs to continue where it was when its time was nearly up.
RESUMES_WITH = ("save", "load", "exit-signal-handler")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is known in full.

    Attributes:
        config: configuration, with paths and variables resolved and everything merged.
        arguments: Megatron's arguments.
        directory: run directory.
        plan: plan of the exchange, or None.
        notes: lines for the user.
        megatron: version of the Megatron-Core that checked the arguments; None if unchecked.
    """

    config: RunConfig
    arguments: Arguments
    directory: Path
    plan: Planned | None
    notes: tuple[str, ...]
    megatron: str | None = None

    @property
    def words(self) -> list[list[str]]:
        """Words of each argument of the script, which reads the cluster file of the directory."""
        arguments = dict(self.arguments)
        if CLUSTER in arguments:
            arguments[CLUSTER] = str(self.directory / "cluster.yaml")
        return words_of(arguments) + words_of(dict(self.config.script_arguments))

    @property
    def lacks_to_resume(self) -> tuple[str, ...]:
        """The arguments without which a requeued job would start over."""
        return tuple(name for name in RESUMES_WITH if name not in self.arguments)

    def lines(self) -> Iterator[str]:
        """Lines about the layout, the plan, the notes and the directory."""
        layout, plan = self.config.layout, self.plan
        sizes = ", ".join(f"{name.upper()} {getattr(layout, name)}" for name in PARALLEL_ARGUMENTS)
        nodes = counted(layout.nodes, "node")
        yield f"{nodes} x {counted(layout.ranks_per_node, 'rank')}: {sizes}"
        if plan is not None:
            yield (
                f"plan: {plan.choice.name}, "
                f"{plan.predicted_us:,.0f} us per layer and micro-batch, predicted"
            )
            yield f"benefit: {plan.benefit.text}"
        yield from (f"note: {note}" for note in self.notes)
        yield f"directory: {self.directory}"

    def document(self) -> dict[str, Any]:
        """The run for JSON; its plan is that of plan.json."""
        return {
            "name": self.config.name,
            "directory": str(self.directory),
            "script": self.config.script,
            "arguments": [word for words in self.words for word in words],
            "environment": {k: str(v) for k, v in self.config.environment.items()},
            "arguments_checked": self.megatron is not None,
            "plan": None if self.plan is None else self.plan.document(),
            "notes": self.notes,
        }


def prepare(file: str, words: Sequence[str], directory: Path | None, dry_run: bool) -> Run:
    """Read, merge and plan.

    Args:
        file: the run file, or a preset.
        words: arguments of Megatron from the command line.
        directory: run directory; None for runs/NAME.
        dry_run: whether this is a dry run, whose script may be missing.

    Raises:
        UserError: one line that names the file, the key, the value and the rule.
    """
    file = str(files.find_config("runs", file))
    config = strict_yaml.load(RunConfig, file)
    directory = free_directory(config.name, directory)
    command_line = from_words(words)
    try:
        config = _with_files(_with_variables(config, directory), Path(file).absolute().parent)
        config, arguments, notes = merge(config, command_line)
        plan, notes_of_plan = plan_run(config, arguments)
        missing = _missing_script(config)
        if missing is not None and not dry_run:
            raise UserError(missing)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return Run(
        config=config,
        arguments=arguments,
        directory=directory,
        plan=plan,
        notes=(*notes, *notes_of_plan, *([] if missing is None else [missing])),
    )


def plan_run(config: RunConfig, arguments: Arguments) -> tuple[Planned | None, tuple[str, ...]]:
    """Plan a run from its arguments, for comparison with what it measures.

    The run itself is given the cluster, not this plan: a plan is for one number of tokens, and the
    dispatcher plans again when the number changes.

    Args:
        config: the configuration, with paths resolved and everything merged.
        arguments: Megatron's arguments.

    Returns:
        The plan, or None where there is nothing to plan; notes for the user.

    Raises:
        UserError: model, cluster, layout and arguments do not fit each other.
    """
    if arguments.get(DISPATCHER) != DISPATCHER_TYPE:
        return None, (f"no plan: {DISPATCHER} is not {DISPATCHER_TYPE}",)
    if not {"num-experts", CLUSTER} <= arguments.keys():
        return None, ("no plan: the file names no model and cluster",)

    # Step 1: what to plan.
    read, layout = Reader(arguments, "megatron"), config.layout
    cluster = load_cluster(str(arguments[CLUSTER]))
    if arguments.get("moe-monta-kernels") == "torch":
        cluster = cluster.with_kernels(fused=False)
    request = PlanRequest(
        model=model_of(arguments, config.name, "megatron"),
        cluster=cluster,
        ranks_per_node=layout.ranks_per_node,
        world_size=layout.world_size,
        **{name: getattr(layout, name) for name in PARALLEL_ARGUMENTS},
    )
    node_size = read.optional("moe-monta-ranks-per-node")
    chains, num_chunks = _candidates(read)

    # Step 2: plan the exchange that the dispatcher will have to plan.
    try:
        planned = plan_request(request, node_size=node_size, chains=chains, num_chunks=num_chunks)
    except UserError as error:
        raise UserError(f"layout: {error}") from error
    notes = list(planned.notes)
    node_size = node_size or planned.nodes.ranks_per_node
    if node_size != layout.ranks_per_node:
        notes.append(
            f"a node link is taken to join {counted(node_size, 'rank')}, and a node to have "
            f"{layout.ranks_per_node}; --moe-monta-ranks-per-node changes the former"
        )
    return planned, (*notes, f"needs {planned.memory.text}")


def _candidates(read: Reader) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The chains and numbers of chunks that the run can choose from."""
    name = "moe-monta-num-chunks"
    num_chunks = read.optional(name)
    chain = read.value("moe-monta-chain") or AUTO
    check_chain(chain, "--moe-monta-chain", also=(AUTO,))
    if chain == AUTO:
        return tuple(CHAINS), NUM_CHUNKS if num_chunks is None else (num_chunks,)
    return (chain,), (chunks_of(CHAINS[chain], num_chunks, f"--{name}"),)


def free_directory(name: str, given: Path | None) -> Path:
    """The run's directory: one that does not exist yet, or is empty. Nothing is written.

    Raises:
        UserError: the given one is not empty, or not a folder.
    """
    if given is not None:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise UserError(f"--run-directory: got {given}, must be a new or an empty folder")
        return given.absolute()
    first = Path("runs", name).absolute()
    others = (first.with_name(f"{name}-{number}") for number in count(2))
    return next(folder for folder in chain([first], others) if not folder.exists())


def _with_variables(config: RunConfig, directory: Path) -> RunConfig:
    """Replace `${NAME}`: in `environment` by the caller's variables, elsewhere by both."""
    checkout = os.environ.get(CHECKOUT)
    known = {
        **os.environ,
        CHECKOUT: UNRESOLVED[:-1] if checkout is None else os.path.abspath(checkout),
        "RUN_DIRECTORY": str(directory),
    }
    data = strict_yaml.plain(config)
    environment = replaced(data.pop("environment"), known, "environment")
    setup = data.pop("setup")
    known |= {name: str(value) for name, value in environment.items()}
    # The lines of `setup` are left to bash.
    data = {**replaced(data, known), "environment": environment, "setup": setup}
    return strict_yaml.build(RunConfig, data, "")


def _with_files(config: RunConfig, folder: Path) -> RunConfig:
    """Make paths absolute, which are relative to the run file, and find the presets."""

    def found(kind: files.ConfigKind, given: str | None) -> str | None:
        return None if given is None else os.path.abspath(files.find_config(kind, given, folder))

    model, cluster = found("models", config.model), found("clusters", config.cluster)
    script = config.script
    if not script.startswith(UNRESOLVED):
        script = os.path.normpath(folder / script)
    return replace(config, model=model, cluster=cluster, script=script)


def _missing_script(config: RunConfig) -> str | None:
    """Why the script cannot be run; None if it can, or lies in the image of a container."""
    script = config.script
    if script.startswith(UNRESOLVED):
        rule = f"must be given where {CHECKOUT} is not set, a checkout of Megatron-LM"
    elif config.slurm.container is None and not Path(script).is_file():
        rule = "must be a Python script that exists"
    else:
        return None
    return f"script: got {script}, {rule}"


def checked(run: Run, force: bool = False) -> Run:
    """The run with the Megatron-Core version that checked it, and notes on what is in doubt.

    Args:
        run: the run.
        force: whether to continue where Megatron refuses the arguments together, or one argument
            of a run in a container.

    Raises:
        UserError: Megatron refuses an argument, named with the nearest one that exists, or all of
            them together.
    """
    answer = _ask(run)
    # A container may have another Megatron.
    if answer.problem is not None and run.config.slurm.container is None:
        raise UserError(answer.problem)
    notes = list(run.notes)
    if answer.unchecked is not None:
        notes.append(f"not checked: {answer.unchecked}")
    if refused := answer.problem or answer.refusal:
        refusal = f"Megatron refuses this, if ranks are as here: {refused}"
        if not force:
            raise UserError(f"{refusal}; --force goes on where the ranks are not as here")
        notes.append(refusal)
    return replace(run, megatron=answer.megatron, notes=tuple(notes))


def _ask(run: Run) -> Answer:
    environment = {
        **os.environ,
        **{name: str(value) for name, value in run.config.environment.items()},
        "WORLD_SIZE": str(run.config.layout.world_size),
        "RANK": "0",
        "PYTHONWARNINGS": "ignore",
    }
    if environment.get("MONTA_CPU_RANKS") == "1":
        # The same default that CPU ranks set in the run itself.
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "monta_megatron.tools.launch.megatron_arguments"),
            os.path.dirname(run.config.script),
        ],
        input=json.dumps([word for words in words_of(run.arguments) for word in words]),
        # The stand-ins let Megatron be imported without a GPU, such as on a login node.
        env={**environment, "MONTA_CPU_RANKS": "1"},
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Answer(unchecked=f"arguments: Megatron's parser failed: {last}")
    return Answer(**json.loads(result.stdout))
