"""run.sh: the one script that bash, srun and sbatch start."""

import os
import sys
from typing import Any

from monta_megatron.common.text import command_line, quoted
from monta_megatron.tools.launch.prepare import PRETRAIN_GPT, Run


def run_script(run: Run) -> str:
    """The text of run.sh: Slurm's options, the environment, and start.sh with the script.

    Raises:
        ValueError: a value is not one line of printable characters.
    """
    layout = run.config.layout
    environment = {
        "RUN_DIRECTORY": str(run.directory),
        # start.sh runs the ranks with this interpreter, whose Megatron has checked the arguments.
        "PYTHON": sys.executable,
        "MOE_MONTA_WATCH_OUT": str(run.directory / "logs"),
        **{name: str(value) for name, value in run.config.environment.items()},
    }
    start = f"--ranks-per-node {layout.ranks_per_node} --nodes {layout.nodes}"
    lines = [
        "#!/usr/bin/env bash",
        *(
            f"#SBATCH --{name}" + ("" if value is None else f"={_quoted_for_sbatch(value)}")
            for name, value in sbatch_options(run).items()
        ),
        *(
            f"##SBATCH --{name}=NAME  # slurm.{name} of the run file"
            for name in ("partition", "account")
            if getattr(run.config.slurm, name) is None
        ),
        "#",
        "# Written by `monta launch`. `bash run.sh` runs it here, `sbatch run.sh` as a job,",
        "# `srun --nodes N --ntasks-per-node 1 bash run.sh` as a step of one.",
        "set -euo pipefail",
        "",
        *(f"export {name}={quoted(value)}" for name, value in environment.items()),
        f"cd {quoted(os.getcwd())}",
        "",
        "arguments=(",
        *(f"    {command_line(argument.words)}" for argument in run.arguments.values()),
        *(f"    {command_line(argument.words)}" for argument in run.script_arguments.values()),
        ")",
        "",
        f'exec bash "$RUN_DIRECTORY/start.sh" {start} -- \\',
        f'    {_script_word(run)} "${{arguments[@]}}"',
    ]
    return "\n".join(lines) + "\n"


def _script_word(run: Run) -> str:
    # Only a dry run leaves the variable unresolved, and bash can still replace it.
    return f'"{PRETRAIN_GPT}"' if run.script == PRETRAIN_GPT else quoted(run.script)


def _quoted_for_sbatch(value: str) -> str:
    # sbatch takes a backslash as an escape between quotes too, where bash does not.
    return quoted(value.replace("\\", "\\\\"))


def sbatch_options(run: Run) -> dict[str, str | None]:
    """The options that sbatch reads from run.sh; start.sh explains what the signal does."""
    options: dict[str, str | None] = {
        **slurm_options(run),
        # sbatch replaces %j and the like in the whole path.
        "output": f"{str(run.directory).replace('%', '%%')}/logs/%j.log",
        # A requeued job continues the log that it began.
        "open-mode": "append",
    }
    if run.lacks_to_resume:
        return {**options, "no-requeue": None}
    return {
        **options,
        "signal": f"B:USR1@{run.config.slurm.signal_before_seconds}",
        "requeue": None,
    }


def slurm_options(run: Run) -> dict[str, str | None]:
    """The options for both srun and sbatch; None for an option without a value.

    There is one task per node, which starts the ranks of its node.
    """
    slurm, layout = run.config.slurm, run.config.layout
    given = {
        "job-name": run.config.name,
        "nodes": layout.nodes,
        "ntasks-per-node": 1,
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time_limit_minutes,
        **slurm.options,
    }
    return {
        name: None if value is True else _text(value)
        for name, value in given.items()
        if value is not None and value is not False
    }


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
