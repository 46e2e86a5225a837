"""What a run leaves to be read later: its configuration, plan, versions, script and logs.

config.yaml     everything resolved; a run file itself
model.yaml      the model that was planned for; model.json if that is a config.json
cluster.yaml    the costs by which the planner chooses, in the run too
plan.yaml       what the planner expects of the exchange, or the plan that the run was given
versions.json   versions, commits, when and how the run was made
run.sh          starts it, under bash, srun or sbatch
start.sh        one process per rank, for run.sh
logs/           the output of the ranks

Only its owner can read it.
"""

import datetime
import json
import os
import shlex
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from monta_megatron.common import presets
from monta_megatron.common.presets import commit, versions
from monta_megatron.tools.launch.prepare import Run, to_run_file
from monta_megatron.tools.launch.script import run_script

START = Path(__file__).with_name("start.sh")


# Megatron's arguments that name a file of ours -> its copy in the run's directory.
COPIED_ARGUMENTS = {"moe-monta-cluster": "cluster.yaml", "moe-monta-plan": "plan.yaml"}


def self_contained(run: Run) -> Run:
    """The run as it reads its files: in its own directory, where `write` copies them."""
    config, megatron = run.config, dict(run.config.megatron)
    # A config.json of Hugging Face stays JSON, which is how it is known.
    names = {"model": "model.yaml", "cluster": "cluster.yaml"}
    if (config.model or "").endswith(".json"):
        names["model"] = "model.json"
    files = {
        names["model"]: config.model,
        "cluster.yaml": megatron.get("moe-monta-cluster") or config.cluster,
        "plan.yaml": megatron.get("moe-monta-plan"),
    }
    if files["cluster.yaml"]:
        files["cluster.yaml"] = presets.find("clusters", str(files["cluster.yaml"]))
    copies = {name: os.path.abspath(str(file)) for name, file in files.items() if file}
    arguments = {
        name: replace(argument, value=str(run.directory / COPIED_ARGUMENTS[name]))
        if name in COPIED_ARGUMENTS
        else argument
        for name, argument in run.arguments.items()
    }
    # The copies stand beside config.yaml, whose `cluster` is the default of the argument.
    beside: dict[str, Any] = {key: name for key, name in names.items() if name in copies}
    if megatron.get("moe-monta-cluster"):
        del megatron["moe-monta-cluster"]
    if megatron.get("moe-monta-plan"):
        megatron["moe-monta-plan"] = str(run.directory / "plan.yaml")
    return replace(
        run,
        config=replace(config, **beside, megatron=megatron),
        arguments=arguments,
        copies=copies,
    )


def write(run: Run) -> None:
    """Make the run directory: all of it, or nothing.

    Raises:
        ValueError: it cannot be written, or exists by now.
    """
    try:
        run.directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=run.directory.parent, prefix=".") as temporary:
            folder = Path(temporary, run.directory.name)
            _fill(folder, run)
            folder.rename(run.directory)
    except OSError as error:
        raise ValueError(f"{run.directory}: cannot be written: {error.strerror}") from error


def _fill(folder: Path, run: Run) -> None:
    # For its owner alone: configuration and script hold the environment, which may hold secrets.
    folder.mkdir(mode=0o700)
    (folder / "logs").mkdir()
    (folder / "config.yaml").write_text(to_run_file(run.config), encoding="utf-8")
    if run.plan is not None:
        run.plan.save(folder / "plan.yaml")
    for name, file in run.copies.items():
        try:
            shutil.copyfile(file, folder / name)
        except OSError as error:
            raise ValueError(f"{file}: cannot be copied: {error.strerror}") from error
    (folder / "versions.json").write_text(json.dumps(_versions(run), indent=2) + "\n")
    script = folder / "run.sh"
    script.write_text(run_script(run), encoding="utf-8")
    script.chmod(0o755)
    shutil.copyfile(START, folder / "start.sh")


def _versions(run: Run) -> dict[str, Any]:
    installed = versions()
    return {
        "versions": installed | {"megatron-core": run.megatron or installed["megatron-core"]},
        "commits": {"monta-megatron": commit(), "script": commit(Path(run.script).parent)},
        "arguments_checked": run.megatron is not None,
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "folder": os.getcwd(),
        "copied": dict(run.copies),
        "notes": run.notes,
    }
