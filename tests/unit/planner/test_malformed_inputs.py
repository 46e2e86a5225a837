"""Whatever is wrong with a file: one line with file, key, value and rule; status 2."""

import ast
from pathlib import Path
from typing import Any

import golden
import yaml
from clusters import CONFIGS
from commands import Monta

GOLDEN = Path(__file__).parent / "golden"
FILES = {"model": "models/deepseek_v3.yaml", "cluster": "clusters/a800_2x8_ib200.yaml"}
MISSING = object()


def command(folder: Path, **files: str | bytes) -> list[str]:
    """`monta plan` on the good files, but for those that are given."""
    words = ["plan", "--world-size", "16", "--ep", "16"]
    for name, good in FILES.items():
        path, content = folder / f"{name}.yaml", files.get(name, (CONFIGS / good).read_bytes())
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        words += [f"--{name}", str(path)]
    return words


def edited(file: str, keys: str, value: object) -> str:
    """A good file with one value changed, or one key left out."""
    data: Any = yaml.safe_load((CONFIGS / FILES[file]).read_text())
    inner, (*outer, last) = data, keys.split(".")
    for key in outer:
        inner = inner[key]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    return yaml.safe_dump(data)


def test_the_good_files_are_good(tmp_path: Path, monta: Monta) -> None:
    status, printed, _ = monta(*command(tmp_path))
    assert status == 0 and "choice" in printed


def test_bad_values_and_texts(tmp_path: Path, monta: Monta) -> None:
    """A case is a whole file, or one key of a good one: its value, or "left out"."""

    def answer(case: str) -> str:
        place, _, given = case.partition(": ")
        file, _, keys = place.partition(" ")
        value = MISSING if given == "left out" else ast.literal_eval(given)
        content = edited(file, keys, value) if keys else value
        return monta.refusal(*command(tmp_path, **{file: content})).replace(f"{tmp_path}/", "")

    golden.check_cases(GOLDEN / "malformed.txt", answer)
