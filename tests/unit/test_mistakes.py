"""Mistakes in all commands: one line, exit status 2, or 130 for Ctrl-C, and nothing left behind.

A command with a stream, as in `> /dev/full`, runs in a shell. `^C MODULE` at its end is Ctrl-C once
Python has imported the module. All others are forks of a process that has imported what takes long.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import golden
import pytest
import yaml
from interrupts import interrupt, started, wait_for
from preloaded import Preloaded

from monta_megatron.cli import COMMANDS, main
from monta_megatron.common.files import CONFIGS
from monta_megatron.tools.trace import Span, Trace

MISTAKES = Path(__file__).parent / "mistakes"
SESSIONS = sorted(MISTAKES.glob("*.txt"))
IMPORTED_ONCE = (
    *("planner.plan", "planner.ranking", "calibration.command", "tools.bench.settings"),
    *("tools.compare", "tools.place", "tools.placed_checkpoint", "tools.timeline"),
    *(f"cli.{name}" for name in COMMANDS),
)
# The commands of a launcher are one of 4 ranks.
RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
SHELL = 'monta() { "$0" -m monta_megatron "$@"; }; %s; exit ${PIPESTATUS[0]}'
# 141: the reader has closed the pipe.
INTERRUPTED, UNREAD, BAD = 130, 141, 2


def monta_on_a_rank(folder: Path, words: list[str]) -> None:
    """The body of a fork."""
    os.chdir(folder)
    os.environ |= RANKS
    sys.argv[1:] = words
    sys.exit(main())


@pytest.fixture(scope="module")
def process() -> Iterator[Preloaded]:
    process = Preloaded("torch", *(f"monta_megatron.{name}" for name in IMPORTED_ONCE))
    yield process
    process.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "configs").symlink_to(CONFIGS)
    (folder / "hf").mkdir()
    for name, content in yaml.safe_load((MISTAKES / "files.yaml").read_text()).items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    spans = (Span("alltoall_dedup in 1 chunk", 0, "dispatch", "alltoall", 0, 0, "inter", 0.0, 1.0),)
    Trace(title="recorded", ranks=("rank 0",), spans=spans, about={}).save(folder / "trace.json")
    return folder


def in_shell(folder: Path, command: str) -> "subprocess.CompletedProcess[str]":
    # With PYTHONUNBUFFERED, argparse itself meets the error of a stream, and is silent.
    environment = {name: each for name, each in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-c", SHELL % command, sys.executable],
        cwd=folder,
        env=environment | RANKS,
        capture_output=True,
        text=True,
        timeout=60,
    )


def interrupted(folder: Path, command: str, module: str) -> "subprocess.CompletedProcess[str]":
    """Ctrl-C once a module is imported; no process and no file stays in the folder."""
    words = ["-X", "importtime", "-m", "monta_megatron", *command.split()[1:]]
    stdout, stderr = folder / "stdout", folder / "stderr"
    with started(words, folder, **RANKS) as (process, mark):
        wait_for(process, lambda: f" {module}\n" in stderr.read_text(), stderr)
        status = interrupt(process, os.kill, mark)
    # If it came within exec(), Python ends by the signal; for a shell that is 130, too.
    status = INTERRUPTED if status == -signal.SIGINT else status
    assert set(folder.iterdir()) == {stdout, stderr}
    lines = stderr.read_text().splitlines(keepends=True)
    said = "".join(line for line in lines if "import time:" not in line)
    return subprocess.CompletedProcess(words, status, stdout.read_text(), said)


def without_this_machine(line: str, folder: Path) -> str:
    places = {str(CONFIGS): "configs", f"{folder}/": "", sys.executable: "python"}
    for place, name in places.items():
        line = line.replace(place, name)
    # argparse quotes the choices in some releases of Python.
    return re.sub(r"\(choose from .*\)", "(choose from ...)", line)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_one_line_and_nothing_left_behind(
    path: Path, folder: Path, process: Preloaded, tmp_path: Path
) -> None:
    before = content(folder)

    def answer(case: str) -> str:
        command, _, module = case.partition(" ^C ")
        if module:
            result = interrupted(tmp_path, command, module)
        elif re.search(r"[|>]", command):
            result = in_shell(folder, command)
        else:
            result = process.run(monta_on_a_rank, folder, command.split()[1:])
        line = without_this_machine(result.stderr, folder).removesuffix("\n")
        status = INTERRUPTED if module else BAD if line else UNREAD
        assert (result.stdout, result.returncode) == ("", status), f"{case}\n{line}"
        assert content(folder) == before, case
        return line

    golden.check_cases(path, answer)


def test_every_command_is_tried() -> None:
    cases = [case for path in SESSIONS for case in path.read_text().splitlines()[::2]]
    assert {word for case in cases for word in case.split()[1:2]} >= {
        name for names in COMMANDS.values() for name in names
    }


def test_no_standard_output_is_no_mistake(folder: Path) -> None:
    plan = "monta plan --model qwen3_30b_a3b --cluster a100_hdr --ep 16"
    result = in_shell(folder, f"{plan} >&-")
    assert (result.returncode, result.stderr) == (0, "")
