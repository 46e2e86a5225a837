"""The run file: model, cluster, layout, environment, data and Megatron's arguments in one YAML.

Megatron's arguments of a run are the model's, then the run file's, then the command line's.

Paths of model, cluster and script are relative to the file's folder. Paths among Megatron's
arguments are left to Megatron: relative to where the run was started. `${NAME}` is a variable of
the file's `environment`, or else of the caller's; `${RUN_DIRECTORY}` is the run's own directory.
Lines of `setup` are left to bash.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from monta_megatron.common.errors import UserError
from monta_megatron.common.rules import PositiveInt, Rule, Text, require
from monta_megatron.integration.options import DISPATCHER_TYPE
from monta_megatron.planner.layout import PARALLEL_ARGUMENTS, ParallelLayout
from monta_megatron.planner.model import Reader, load_arguments


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _is_argument(value: Any) -> bool:
    entries = value if isinstance(value, list) and value else [value]
    return isinstance(value, bool) or all(map(_is_scalar, entries))


VariableValue = Annotated[Any, Rule("a text or a number", _is_scalar)]
# Of Megatron: true is a flag without a value, false leaves the argument out, a list is several
# values.
ArgumentValue = Annotated[
    Any, Rule("a text, a number, true, false, or a list of texts and numbers", _is_argument)
]
FolderName = Annotated[
    str,
    Rule(
        "letters, digits, '.', '_' and '-', a letter or digit first",
        lambda value: re.fullmatch(r"[A-Za-z0-9][\w.-]*", value, re.ASCII) is not None,
    ),
]


@dataclass(frozen=True, kw_only=True)
class RunLayout(ParallelLayout):
    """Nodes, and the sizes of Megatron's parallel groups on them.

    Attributes:
        nodes: number of hosts.
        ranks_per_node: number of processes, and so of GPUs, per host.
    """

    world_size: PositiveInt = field(init=False)
    nodes: PositiveInt
    ranks_per_node: PositiveInt

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_size", self.nodes * self.ranks_per_node)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Container:
    """Image in which the ranks run; the job's script and `setup` run outside.

    Attributes:
        image: container image; one that ends in .sif runs by `apptainer exec`, any other by Pyxis,
            through options of srun.
        mounts: mounts of the form HOST:CONTAINER, in addition to the run directory.
        workdir: folder in which the ranks start; None for the image's.
    """

    image: Text
    mounts: tuple[Text, ...] = ()
    workdir: Text | None = None


# Options of sbatch that `start.sbatch_options` sets from other keys.
OWN_OPTIONS = ("nodes", "ntasks", "ntasks-per-node", "output", "open-mode", "signal", "no-requeue")


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A job, whose nodes and tasks are those of the layout.

    Attributes:
        options: options of sbatch by their long names, such as `time: 240` (minutes) and
            `partition`. `gpus-per-node: N`, `exclusive: true` and `mem: 0` request the GPUs and
            all memory of whole nodes. `requeue: false` lets the job end at its limit.
        signal_before_seconds: time before the limit at which the training is told to write a
            checkpoint, if it has --save, --load and --exit-signal-handler; the job is then
            requeued.
        container: container of the ranks; None to run them on the host.
    """

    options: Mapping[str, ArgumentValue] = field(default_factory=dict)
    signal_before_seconds: PositiveInt = 300
    container: Container | None = None

    def __post_init__(self) -> None:
        for name in OWN_OPTIONS:
            rule = "be left out: launch sets it, by layout, signal_before_seconds and requeue"
            require(name not in self.options, f"options.{name}", self.options.get(name), rule)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run.

    Attributes:
        name: name of the run directory (runs/NAME, or runs/NAME-2 and so on) and of the job.
        layout: nodes and parallel sizes, which are passed on to Megatron.
        megatron: Megatron's arguments by their names without --, with dashes or underscores; true
            sets a flag, false leaves the argument out, a list gives several values.
        model: model file, Hugging Face config.json or preset, which adds Megatron arguments.
        cluster: cluster file or preset, for the plan and --moe-monta-cluster.
        script: training script of every rank.
        script_arguments: arguments that the script adds to Megatron's, passed on unchecked.
        setup: lines of bash to run before the ranks start, such as `module load cuda`.
        environment: environment variables of every rank.
        slurm: settings of the Slurm job.
    """

    name: FolderName
    layout: RunLayout
    megatron: Mapping[str, ArgumentValue]
    model: Text | None = None
    cluster: Text | None = None
    script: Text = "${MEGATRON_LM_DIR}/pretrain_gpt.py"
    script_arguments: Mapping[str, ArgumentValue] = field(default_factory=dict)
    setup: tuple[Text, ...] = ()
    environment: Mapping[str, VariableValue] = field(default_factory=dict)
    slurm: Slurm = field(default_factory=Slurm)


DISPATCHER = "moe-token-dispatcher-type"
# Arguments that begin so -> the one dispatcher that takes them.
ONLY_FOR = {"moe-monta-": DISPATCHER_TYPE, "moe-flex-": "flex", "moe-enable-deepep": "flex"}
CLUSTER = "moe-monta-cluster"
VARIABLE = re.compile(r"\$\{(\w+)\}")

# Name with dashes -> a text, a number, a list of them, True for a flag, or False for an argument
# that is left out; in the order in which they are passed on.
Arguments = dict[str, Any]


def key_of(name: str) -> str:
    """One spelling for `lr-decay-style` and `lr_decay_style`."""
    return name.replace("_", "-")


def from_words(words: Sequence[str]) -> Arguments:
    """The arguments of a command line; `--name false` leaves out one of the file.

    Raises:
        UserError: the first word is not an argument's name.
    """
    values: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word.removeprefix("--").partition("=")
            values[key_of(name)] = [value] if has_value else []
        elif name is None:
            raise UserError(f"got {word!r} after --, must be arguments of Megatron: --lr 1e-4")
        else:
            values[key_of(name)].append(word)
    return {name: _value_of(words) for name, words in values.items()}


def _value_of(words: list[str]) -> Any:
    if words == ["false"]:
        return False
    return True if not words else words[0] if len(words) == 1 else words


def words_of(arguments: Arguments) -> list[list[str]]:
    """Words of each argument on a command line."""
    return [
        [f"--{name}"]
        if value is True
        else [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        for name, value in arguments.items()
        if value is not False
    ]


def merge(
    config: RunConfig, command_line: Arguments
) -> tuple[RunConfig, Arguments, tuple[str, ...]]:
    """Merge the model, defaults, the run file and the command line, the last of which wins.

    Args:
        config: the file's configuration, its variables replaced and its paths resolved.
        command_line: the arguments after `--`; a parallel size changes the layout.

    Returns:
        The configuration with everything in it, so that it needs no model file; Megatron's
        arguments; notes on the model, and what was left out and why.

    Raises:
        UserError: the layout contradicts its number of ranks.
    """
    # Step 1: the script's arguments may be given after `--` too.
    given = dict(command_line)
    script_arguments = {
        name: given.pop(key_of(name), value) for name, value in config.script_arguments.items()
    }

    # Step 2: all of Megatron's.
    model_arguments, notes = ({}, ()) if config.model is None else load_arguments(config.model)
    defaults = {DISPATCHER: DISPATCHER_TYPE, CLUSTER: config.cluster or False}
    sources = (model_arguments, defaults, config.megatron, given)
    arguments: Arguments = {key_of(n): value for source in sources for n, value in source.items()}
    arguments = {name: value for name, value in arguments.items() if value is not False}
    cluster = arguments.get(CLUSTER)
    # A dispatcher refuses options of another; so one file serves to compare them.
    for prefix, dispatcher in ONLY_FOR.items():
        refused = [name for name in arguments if name.startswith(prefix)]
        if refused and arguments.get(DISPATCHER) != dispatcher:
            notes = (*notes, f"{', '.join(refused)}: left out, {DISPATCHER} is not {dispatcher}")
            arguments = {name: arguments[name] for name in arguments if name not in refused}

    # Step 3: the layout, and the arguments that are its.
    read = Reader(arguments, "megatron")
    sizes = {
        field: read.size(name, getattr(config.layout, field))
        for field, name in PARALLEL_ARGUMENTS.items()
    }
    parallel_sizes = {PARALLEL_ARGUMENTS[field]: size for field, size in sizes.items()}
    others = {name: value for name, value in arguments.items() if name not in parallel_sizes}
    try:
        layout = replace(config.layout, **sizes)
    except UserError as error:
        raise UserError(f"layout.{error}") from error
    resolved = replace(
        config,
        layout=layout,
        model=None,
        cluster=cluster,
        megatron={name: value for name, value in others.items() if name != CLUSTER},
        script_arguments=script_arguments,
    )
    return resolved, parallel_sizes | others, tuple(notes)


def replaced(value: Any, variables: Mapping[str, str], key: str = "") -> Any:
    """A value with `${NAME}` replaced in its texts.

    Args:
        value: mapping, list or scalar.
        variables: NAME -> text.
        key: path of the value, for messages.

    Raises:
        UserError: a variable is not set.
    """
    if isinstance(value, Mapping):
        path = f"{key}." if key else ""
        return {name: replaced(entry, variables, path + name) for name, entry in value.items()}
    if isinstance(value, list):
        return [replaced(entry, variables, key) for entry in value]
    if not isinstance(value, str):
        return value
    for name in VARIABLE.findall(value):
        if name not in variables:
            raise UserError(f"{key}: got {value}, {name} must be set")
    return VARIABLE.sub(lambda match: variables[match[1]], value)
