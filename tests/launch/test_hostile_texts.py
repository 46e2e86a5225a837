"""Every text of a run file against what shells, logs and terminals give a meaning to.

A text is refused in one line, or it reaches the ranks unchanged: what was generated is executed,
through run.sh and start.sh, with a stand-in for the interpreter that notes what it is given. A text
that a shell ran would leave a file.
"""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from monta_megatron.tools.launch import start
from monta_megatron.tools.launch.prepare import prepare
from monta_megatron.tools.launch.start import run_script

MARKER = "injected"
TOUCH = f"touch {MARKER}"

# name: a text that must not be more than a text.
HOSTILE = {
    "line break": f"a\n{TOUCH}",
    "line break and option": f"a\n#SBATCH --comment=x\n{TOUCH}",
    "carriage return": f"a\r{TOUCH}",
    "NUL": "a\0b",
    "escape sequence": "a\x1b[2J\x1b[1;31mb",
    "half a character": "a\udc80b",
    "both quotes": f"'\"; {TOUCH}; \"'",
    "command": f"$$({TOUCH})",
    "backticks": f"`{TOUCH}`",
    "variable": "$${HOME}",
    "semicolon": f"; {TOUCH}",
    "redirection": f"> {MARKER}",
    "comment": f"# {TOUCH}",
    "backslash": f"a\\'; {TOUCH}; \\",
    "dash": "-c",
    "two dashes": "--nproc-per-node",
    "star": "*",
    "spaces": " a  b ",
    "empty": "",
}
UNPRINTABLE = tuple(name for name, text in HOSTILE.items() if not text.isprintable())

# Where a run file holds a text: the keys to it, None for a key that is itself the text.
FIELDS: dict[str, tuple[Any, ...]] = {
    "name": ("name",),
    "model": ("model",),
    "cluster": ("cluster",),
    "script": ("script",),
    "argument": ("megatron", "data-path"),
    "one of an argument's values": ("megatron", "data-path", 0),
    "argument's name": ("megatron", None),
    "script's argument": ("script_arguments", "record"),
    "name of a script's argument": ("script_arguments", None),
    "variable": ("environment", "TEXT"),
    "variable's name": ("environment", None),
    "partition": ("slurm", "partition"),
    "account": ("slurm", "account"),
    "option": ("slurm", "options", "comment"),
    "one of an option's values": ("slurm", "options", "comment", 0),
    "option's name": ("slurm", "options", None),
}

STAND_IN = """#!/bin/sh
# In the place of Python: notes its arguments and one variable, and starts nothing.
printf '%s\\0' "$@" >"$NOTES"
printf '%s\\0' "$TEXT" "$RUN_DIRECTORY" >>"$NOTES"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a script, a stand-in for the interpreter, and nothing else."""
    (tmp_path / "train.py").touch()
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return tmp_path


def run_file(folder: Path, keys: tuple[Any, ...] = (), text: str = "") -> Path:
    """A run file that holds `text` at `keys`."""
    data: dict[str, Any] = {
        "name": "run",
        "layout": {"nodes": 1, "ranks_per_node": 2},
        "script": "train.py",
        "megatron": {"moe-token-dispatcher-type": "alltoall"},
        "script_arguments": {},
        "environment": {
            "PYTHON": str(folder / "python"),
            "NOTES": str(folder / "notes"),
            "TEXT": "x",
        },
        "slurm": {"options": {}},
    }
    if keys:
        inner: Any = data
        *path, last = keys
        value: Any = text
        if last == 0:
            *path, last = path
            value = ["first", text]
        for key in path:
            inner = inner[key]
        if last is None:
            last, value = text, "value"
        inner[last] = value
    file = folder / "run.yaml"
    # JSON is YAML, and writes every character.
    file.write_text(json.dumps(data))
    return file


def outcome(file: Path, *words: str, directory: Path | None = None) -> dict[str, Any] | str:
    """What the ranks were given, once run.sh has run; or the line that refuses it."""
    try:
        run = prepare(str(file), words, directory, dry_run=False)
        start.write(run)
    except ValueError as error:
        return str(error)
    done = subprocess.run(
        ["bash", str(run.directory / "run.sh")],
        env={k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    notes = (file.parent / "notes").read_bytes().decode().split("\0")[:-1]
    *arguments, variable, run_folder = notes
    script = run_script(run)
    return {
        "arguments": arguments[arguments.index(run.script) + 1 :],
        "variable": variable,
        "directory": run_folder,
        "sbatch": sbatch_options(script),
        "expected": [
            word
            for group in (run.arguments, run.script_arguments)
            for argument in group.values()
            for word in argument.words
        ],
    }


def sbatch_options(script: str) -> dict[str, str]:
    """The options that sbatch reads in a script: up to the first line that is no comment."""
    options = {}
    for line in script.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            # sbatch takes a backslash as an escape between single quotes too.
            (word,) = shlex.split(line.removeprefix("#SBATCH").replace("\\\\", "\\"))
            name, _, value = word.removeprefix("--").partition("=")
            options[name] = value
    return options


def assert_one_line(text: str, *said: str) -> None:
    assert text.isprintable(), repr(text)
    for part in said:
        assert part in text


def assert_nothing_ran(folder: Path) -> None:
    assert not list(folder.rglob(f"*{MARKER}*"))


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_refused_or_reaches_the_ranks_unchanged(folder: Path, field: str) -> None:
    keys = FIELDS[field]
    usual = set(sbatch_options(run_script(prepare(str(run_file(folder)), [], None, dry_run=False))))
    refused = set()
    for name, text in HOSTILE.items():
        result = outcome(run_file(folder, keys, text))
        assert_nothing_ran(folder)
        if isinstance(result, str):
            assert_one_line(result, "run.yaml")
            refused.add(name)
            continue
        assert result["arguments"] == result["expected"], name
        if keys[0] in ("megatron", "script_arguments", "environment"):
            text = text.replace("$$", "$")
        if field == "variable":
            assert result["variable"] == text
        elif field in ("argument", "script's argument"):
            assert result["arguments"][-1] == text
        elif keys[0] == "slurm":
            added = "comment" if keys[1] == "options" else keys[1]
            assert set(result["sbatch"]) == usual | {added}
            assert result["sbatch"][added].removeprefix("first,") == text
    assert set(UNPRINTABLE) <= refused, set(UNPRINTABLE) - refused
    if None in keys:
        # A name is letters, digits and dashes, or it is none.
        assert refused == set(HOSTILE)


@pytest.mark.parametrize("name", HOSTILE)
def test_folders(folder: Path, name: str) -> None:
    """The run's directory, given or by the current folder."""
    text = HOSTILE[name]
    if name == "NUL":
        with pytest.raises(ValueError, match="run-directory"):
            prepare(str(run_file(folder)), [], Path(text), dry_run=False)
        return
    given = folder / f"x{text}".replace("/", "_")
    result = outcome(run_file(folder), directory=given)
    assert_nothing_ran(folder / "work")
    if isinstance(result, str):
        assert name in UNPRINTABLE
        assert_one_line(result, "--run-directory: got")
        assert not given.exists()
        return
    assert result["directory"] == str(given)
    assert result["sbatch"]["output"] == f"{str(given).replace('%', '%%')}/logs/%j.log"


@pytest.mark.parametrize("name", HOSTILE)
def test_words_after_the_dashes(folder: Path, name: str) -> None:
    result = outcome(run_file(folder), "--data-path", f"x{HOSTILE[name]}")
    assert_nothing_ran(folder)
    if isinstance(result, str):
        assert name in UNPRINTABLE
        assert_one_line(result, "an argument after `--`: got")
    else:
        assert result["arguments"][-1] == f"x{HOSTILE[name]}"


def test_variables_of_the_caller(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", HOSTILE["line break"])
    result = outcome(run_file(folder, ("megatron", "data-path"), "${GIVEN}"))
    assert isinstance(result, str)
    assert_one_line(result, "megatron.data-path: got 'a\\ntouch injected'", "printable")
    monkeypatch.setenv("GIVEN", HOSTILE["command"])
    result = outcome(run_file(folder, ("megatron", "data-path"), "${GIVEN}"))
    assert isinstance(result, dict) and result["arguments"][-1] == HOSTILE["command"]
    assert_nothing_ran(folder)


def test_the_folder_that_a_run_starts_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("line break", "both quotes", "command", "escape sequence"):
        inside = folder / HOSTILE[name].replace("/", "_")
        inside.mkdir()
        monkeypatch.chdir(inside)
        result = outcome(run_file(folder))
        assert isinstance(result, str) == (name in UNPRINTABLE)
        assert list(inside.iterdir()) == ([] if name in UNPRINTABLE else [inside / "runs"])
