"""Whatever is wrong with a file: one line with file, key, value and rule; status 2."""

import ast
from pathlib import Path
from typing import Any

import golden
import yaml
from clusters import CONFIGS, GOLDEN
from commands import Monta

GOOD = {
    "model": CONFIGS / "models" / "deepseek_v3.yaml",
    "cluster": CONFIGS / "clusters" / "a800_2x8_ib200.yaml",
}


def edited(file: str, keys: str, value: str) -> str:
    """A good file with one value changed, or one key left out."""
    data: Any = yaml.safe_load(GOOD[file].read_text())
    inner, (*outer, last) = data, keys.split(".")
    for key in outer:
        inner = inner[key]
    if value == "left out":
        del inner[last]
    else:
        inner[last] = ast.literal_eval(value)
    return yaml.safe_dump(data)


def test_bad_values_and_texts(tmp_path: Path, monta: Monta) -> None:
    """A case is a whole file, or one key of a good one: its value, or "left out"."""

    def answer(case: str) -> str:
        place, _, given = case.partition(": ")
        file, _, keys = place.partition(" ")
        content = edited(file, keys, given) if keys else ast.literal_eval(given)
        path = tmp_path / f"{file}.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        words = (f"--{name}={each}" for name, each in {**GOOD, file: path}.items())
        error = monta.refusal("plan", "--world-size", "16", "--ep", "16", *words)
        return error.replace(f"{tmp_path}/", "")

    golden.check_cases(GOLDEN / "malformed.txt", answer)
