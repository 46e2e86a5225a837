"""What a run leaves to be read later: its configuration, plan, versions, script and logs.

config.yaml     everything resolved; a run file itself
plan.yaml       what the planner expects of the exchange
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
from pathlib import Path
from typing import Any

from monta_megatron.launch.prepare import Run, to_run_file
from monta_megatron.launch.script import run_script
from monta_megatron.provenance import commit, versions

START = Path(__file__).with_name("start.sh")


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
    (folder / "versions.json").write_text(json.dumps(_versions(run), indent=2) + "\n")
    script = folder / "run.sh"
    script.write_text(run_script(run), encoding="utf-8")
    script.chmod(0o755)
    shutil.copyfile(START, folder / "start.sh")


def _versions(run: Run) -> dict[str, Any]:
    found = versions()
    found["megatron-core"] = run.megatron or found["megatron-core"]
    return {
        "versions": found,
        "commits": {"monta-megatron": commit(), "script": commit(Path(run.script).parent)},
        "arguments_checked": run.megatron is not None,
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "folder": os.getcwd(),
        "notes": run.notes,
    }
