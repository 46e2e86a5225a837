"""Texts of a run file that shells give a meaning to reach the ranks unchanged.

What was generated is executed, through run.sh and start.sh, with a stand-in for the interpreter
that notes what it is given. A text that a shell ran would leave a file.
"""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from monta_megatron.tools.launch import start
from monta_megatron.tools.launch.prepare import prepare
from monta_megatron.tools.launch.start import run_script

HOSTILE = yaml.safe_load(Path(__file__).with_name("hostile.yaml").read_text())

STAND_IN = """#!/bin/sh
# In the place of Python: notes two variables and its arguments, and starts nothing.
printf '%s\\0' "$TEXT" "$RUN_DIRECTORY" "$@" >"$NOTES"
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_texts_reach_the_ranks_unchanged(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HOSTILE[name]
    (tmp_path / "train.py").touch()
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    # JSON is YAML, and writes every character.
    data = {
        "name": "run",
        "layout": {"nodes": 1, "ranks_per_node": 2},
        "script": "train.py",
        "megatron": {"moe-token-dispatcher-type": "alltoall", "data-path": ["x", text]},
        "script_arguments": {"record": text},
        "environment": {
            "PYTHON": str(tmp_path / "python"),
            "NOTES": str(tmp_path / "notes"),
            "TEXT": text,
        },
        "slurm": {"options": {"comment": text, "exclude": ["a", text], "mem": 0}},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(data))
    work = tmp_path / f"w{text}"
    work.mkdir()
    monkeypatch.chdir(work)
    run = prepare("../run.yaml", ["--load", f"x{text}"], Path(f"x{text}"), dry_run=False)
    start.write(run)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    subprocess.run(["bash", str(run.directory / "run.sh")], env=environment, check=True)
    variable, directory, *words = (tmp_path / "notes").read_bytes().decode().split("\0")[:-1]
    assert (variable, directory) == (text, str(run.directory))
    given = words[words.index(run.config.script) + 1 :]
    assert given == [word for argument in run.words for word in argument]
    assert {text, f"x{text}"} <= set(given)
    assert not list(tmp_path.rglob("injected"))
    # sbatch takes a backslash as an escape between single quotes too.
    options = [
        shlex.split(line.removeprefix("#SBATCH").replace("\\\\", "\\"))
        for line in run_script(run).splitlines()
        if line.startswith("#SBATCH")
    ]
    for option in (f"--comment={text}", f"--exclude=a,{text}", "--mem=0"):
        assert [option] in options
    assert [f"--output={run.directory}/logs/%j.log"] in options
