"""Bad input to any sub-command: exit status 2, one line that says what is wrong, nothing written.

Each command of `bad_input` runs as a process of its own, forked from one that has imported what
takes long.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import golden
import pytest
from commands import sub_parsers
from preloaded import Preloaded

from monta_megatron.cli import main
from monta_megatron.common import files

SESSIONS = sorted((Path(__file__).parent / "bad_input").glob("*.txt"))
IMPORTED_ONCE = ("tools.bench.settings", "planner.plan", "planner.ranking", "calibration.command")


def monta_on_a_rank(folder: Path, words: list[str]) -> None:
    """One of 4 ranks, for the commands that a launcher starts."""
    os.chdir(folder)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    sys.argv[1:] = words
    sys.exit(main())


@pytest.fixture(scope="module")
def process() -> Iterator[Preloaded]:
    process = Preloaded("torch", *(f"monta_megatron.{name}" for name in IMPORTED_ONCE))
    yield process
    process.close()


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_one_line_and_status_2(path: Path, process: Preloaded, tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(files.CONFIGS)
    (tmp_path / "train.py").touch()
    (tmp_path / "kept.yaml").write_text("kept")

    def answer(words: str) -> str:
        result = process.run(monta_on_a_rank, tmp_path, words.split())
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        (line,) = result.stderr.splitlines()
        assert {each.name for each in tmp_path.iterdir()} == {"configs", "train.py", "kept.yaml"}
        assert (tmp_path / "kept.yaml").read_text() == "kept"
        return line.replace(str(files.CONFIGS), "configs").replace(sys.executable, "python")

    golden.check_session(path, answer)


def test_good_input_passes_the_same_way(process: Preloaded, tmp_path: Path) -> None:
    words = "plan --model mixtral_8x7b --cluster a800_2x8_ib200 --ep 8 --json"
    result = process.run(monta_on_a_rank, tmp_path, words.split())
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["shape"]["layout"]["ep"] == 8


def test_every_command_is_tried() -> None:
    commands = {name.split()[0] for name in sub_parsers()}
    assert {path.stem for path in SESSIONS} == commands | {"monta"}
