"""The run file: model, cluster, layout, environment, data and Megatron's arguments in one YAML.

Paths of model, cluster and script are relative to the file's folder. Paths among Megatron's
arguments are left to Megatron: relative to where the run was started. `${NAME}` is a variable of
the file's `environment`, or else of the caller's; `${RUN_DIRECTORY}` is the run's own directory.
Lines of `setup` are left to bash.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from monta_megatron.common.rules import PositiveInt, Rule, Text
from monta_megatron.planner.layout import ParallelLayout


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

    @property
    def parallel(self) -> ParallelLayout:
        """The layout in the planner's form.

        Raises:
            ValueError: the sizes do not divide the ranks.
        """
        return ParallelLayout(
            world_size=self.nodes * self.ranks_per_node,
            tp=self.tp,
            ep=self.ep,
            etp=self.etp,
            pp=self.pp,
            cp=self.cp,
        )


@dataclass(frozen=True, kw_only=True)
class Container:
    """Image in which the ranks run; the job's script and `setup` run outside.

    Attributes:
        image: one that ends in .sif runs by `apptainer exec`, any other by Pyxis, options of srun.
        mounts: HOST:CONTAINER each, in addition to the run's directory.
        workdir: folder in which the ranks start; without it the image's.
    """

    image: Text
    mounts: tuple[Text, ...] = ()
    workdir: Text | None = None


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A job, whose nodes and tasks are those of the layout.

    Attributes:
        options: of sbatch by their long names, such as `time: 240` (minutes) or `partition`. The
            GPUs and all memory of whole nodes are asked for by `gpus-per-node: N`, `exclusive:
            true` and `mem: 0`.
        signal_before_seconds: how long before the limit the training is told to write a checkpoint,
            if it has --save, --load and --exit-signal-handler; the job is then requeued.
        container: image of the ranks; without it they run on the host.
    """

    options: Mapping[str, ArgumentValue] = field(default_factory=dict)
    signal_before_seconds: PositiveInt = 300
    container: Container | None = None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run.

    Attributes:
        name: of the run's directory (runs/NAME, or runs/NAME-2 and so on) and of its job.
        layout: nodes and parallel sizes, which are passed on to Megatron.
        megatron: Megatron's arguments by their names without --, with dashes or underscores; true
            is a flag, false leaves it out, a list is several values.
        model: a model file, a config.json of Hugging Face or a preset: more of those arguments.
        cluster: a cluster file or a preset, for the plan and --moe-monta-cluster.
        script: training script of every rank.
        script_arguments: arguments that the script adds to Megatron's, passed on unchecked.
        setup: lines of bash that run before, such as `module load cuda`.
        environment: environment variables of every rank.
        slurm: options of a job.
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
