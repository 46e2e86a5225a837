"""The run file: model, cluster, layout, environment, data and Megatron's arguments in one YAML.

Paths of model, cluster and script are relative to the file's folder. Paths among Megatron's
arguments are left to Megatron: relative to where the run was started. `${NAME}` is a variable of
the file's `environment`, or else of the caller's; `${RUN_DIRECTORY}` is the run's own directory.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from monta_megatron.common.rules import ArgumentValue, PositiveInt, Rule, Text, is_scalar, require
from monta_megatron.planner.layout import ParallelLayout

VariableValue = Annotated[Any, Rule("a text or a number", is_scalar)]
# No time such as 4:00:00: sbatch would read 4:00 as 4 minutes, others as 4 hours.
Minutes = Annotated[
    int, Rule("a number of minutes, an integer >= 1: 240 for 4 hours", lambda value: value >= 1)
]
FolderName = Annotated[
    str,
    Rule(
        "letters, digits, '.', '_' and '-', a letter or digit first",
        lambda value: re.fullmatch(r"[A-Za-z0-9][\w.-]*", value, re.ASCII) is not None,
    ),
]

_ARGUMENT_NAME = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)

# Options that are set from other keys.
RESERVED_SLURM_OPTIONS = (
    *("job-name", "nodes", "ntasks", "ntasks-per-node", "partition", "account", "time"),
    *("output", "open-mode", "signal", "requeue", "no-requeue"),
)


@dataclass(frozen=True, kw_only=True)
class RunLayout:
    """Nodes, and the sizes of Megatron's parallel groups on them.

    Attributes:
        nodes: hosts of the run.
        ranks_per_node: processes, and so GPUs, of each.
        tp: tensor parallel size.
        ep: expert parallel size.
        etp: expert tensor parallel size.
        pp: pipeline parallel size.
        cp: context parallel size.
    """

    nodes: PositiveInt
    ranks_per_node: PositiveInt
    tp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1

    def __post_init__(self) -> None:
        try:
            _ = self.parallel
        except ValueError as error:
            rule = str(error).removeprefix("world_size: ")
            raise ValueError(f"nodes * ranks_per_node: {rule}") from error

    @property
    def parallel(self) -> ParallelLayout:
        """The layout in the planner's form."""
        return ParallelLayout(
            world_size=self.nodes * self.ranks_per_node,
            tp=self.tp,
            ep=self.ep,
            etp=self.etp,
            pp=self.pp,
            cp=self.cp,
        )


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Options for srun and sbatch, in addition to nodes and tasks.

    Attributes:
        partition: its name; without it the cluster's default.
        account: whom the job is charged to; without it the user's default.
        time_limit_minutes: time limit of the job.
        signal_before_seconds: how long before the limit the training is told to write a checkpoint,
            if it has --save, --load and --exit-signal-handler; the job is then requeued.
        options: any other option by its long name. The GPUs and all memory of whole nodes are
            asked for by `gpus-per-node: N`, `exclusive: true` and `mem: 0`.
    """

    partition: Text | None = None
    account: Text | None = None
    time_limit_minutes: Minutes | None = None
    signal_before_seconds: PositiveInt = 300
    options: Mapping[str, ArgumentValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_names("options", self.options)
        for name in self.options:
            if name in RESERVED_SLURM_OPTIONS:
                rule = "must be left out; another key of the file says it"
                raise ValueError(f"options.{name}: {rule}")
        # Slurm may send the signal a minute early, and Megatron listens for it only after a while.
        limit = self.time_limit_minutes
        require(
            limit is None or 60 * limit >= 2 * self.signal_before_seconds,
            "signal_before_seconds",
            self.signal_before_seconds,
            f"be at most half of time_limit_minutes, {limit} min",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run.

    Attributes:
        name: of the run's directory (runs/NAME, or runs/NAME-2 and so on) and of its job.
        layout: nodes and parallel sizes, which are passed on to Megatron.
        megatron: Megatron's arguments by their names without --, with dashes or underscores; true
            is a flag, false leaves it out, a list is several values.
        model: a model file, a config.json of Hugging Face or a preset, for the plan.
        cluster: a cluster file or a preset, for the plan and --moe-monta-cluster.
        script: training script of every rank; without it ${MEGATRON_LM_DIR}/pretrain_gpt.py.
        script_arguments: arguments that the script adds to Megatron's, passed on unchecked.
        environment: environment variables of every rank.
        slurm: options for srun and sbatch.
    """

    name: FolderName
    layout: RunLayout
    megatron: Mapping[str, ArgumentValue]
    model: Text | None = None
    cluster: Text | None = None
    script: Text | None = None
    script_arguments: Mapping[str, ArgumentValue] = field(default_factory=dict)
    environment: Mapping[str, VariableValue] = field(default_factory=dict)
    slurm: Slurm = field(default_factory=Slurm)

    def __post_init__(self) -> None:
        _check_names("megatron", self.megatron)
        _check_names("script_arguments", self.script_arguments)
        for name in self.environment:
            is_variable = re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is not None
            require(is_variable, "environment", repr(name), "be the name of a variable")


def _check_names(field_name: str, options: Mapping[str, Any]) -> None:
    for name in options:
        require(
            _ARGUMENT_NAME.fullmatch(name) is not None,
            field_name,
            repr(name),
            "be a name without its --: letters, digits, '-' and '_'",
        )
