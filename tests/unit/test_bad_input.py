"""Bad input to any sub-command: exit status 2, one line that says what is wrong, nothing written.

Each command runs as a process of its own, forked from one that has imported what takes long.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import golden
import pytest
from preloaded import Preloaded

from monta_megatron.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
# What is typed, and the line that answers it.
GOLDEN = Path(__file__).with_name("bad_input.txt")
# Words that the file has for others.
SHORT = {
    "PLAN": "plan --model MODEL --cluster CLUSTER",
    "BENCH": "bench --experts 8 --top-k 2 --hidden 32 --tokens 16",
    "CALIBRATE": "calibrate --out c.yaml",
    "EMULATE": "emulate --nodes 2 --ranks-per-node 2 --inter-mbit 500",
    "MODEL": "CONFIGS/models/mixtral_8x7b.yaml",
    "CLUSTER": "CONFIGS/clusters/a800_2x8_ib200.yaml",
    "RUN": "CONFIGS/runs/mixtral_8x7b.yaml",
    "CONFIGS": str(CONFIGS),
}

IMPORTED_ONCE = (
    "tools.bench.settings",
    "planner.plan",
    "planner.ranking",
    "calibration.command",
)

Monta = Callable[[Path, str], tuple[int, str, str]]


def in_full(words: str) -> str:
    for name, meant in SHORT.items():
        words = re.sub(rf"\b{name}\b", meant, words)
    return words


def monta_on_a_rank(folder: Path, words: list[str]) -> None:
    """One of 4 ranks, for the commands that a launcher starts."""
    os.chdir(folder)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    sys.argv[1:] = words
    sys.exit(main())


@pytest.fixture(scope="module")
def monta() -> Iterator[Monta]:
    """Runs one command line in a folder: exit status, standard output, standard error."""
    process = Preloaded("torch", *(f"monta_megatron.{name}" for name in IMPORTED_ONCE))

    def run(folder: Path, words: str) -> tuple[int, str, str]:
        result = process.run(monta_on_a_rank, folder, words.split())
        return result.returncode, result.stdout, result.stderr

    yield run
    process.close()


def test_one_line_and_status_2(monta: Monta, tmp_path: Path) -> None:
    answers = []
    for words in re.findall(r"^\$ monta(.*)", GOLDEN.read_text(encoding="utf-8"), re.MULTILINE):
        status, stdout, stderr = monta(tmp_path, in_full(words))
        assert (status, stdout) == (2, ""), f"{words}: {stderr}"
        (line,) = stderr.splitlines()
        answers.append(f"$ monta{words}\n{line.replace(str(CONFIGS), 'CONFIGS')}\n")
        assert list(tmp_path.iterdir()) == []
    golden.check(GOLDEN, "\n".join(answers))


def test_good_input_passes_the_same_way(monta: Monta, tmp_path: Path) -> None:
    status, stdout, stderr = monta(tmp_path, in_full("PLAN --ep 8 --json"))
    assert (status, stderr) == (0, "")
    assert json.loads(stdout)["shape"]["layout"]["ep"] == 8
