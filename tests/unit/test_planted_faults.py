"""The planter of faults finds its code after the code was moved, renamed or formatted otherwise."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from planted_faults import plant

SOURCE = """\
FIELDS = ("hidden_size", "topk")

class Memory:
    def reserve(self, sizes):
        end = 0
        for size in sizes:
            end = max(end, size)  # the largest
        return end

def split(rows, num_chunks):
    try:
        return rows // num_chunks
    except ZeroDivisionError as error:
        print(error)
        return 0
"""
EXCEPT = "except ZeroDivisionError as error:\n    A\n    return {}\n"
# The place of a fault, both sides of its edit, and what it makes of a line.
FAULTS = {
    "expression": ("memory:Memory.reserve", "max(A, B)", "B", "end = max(end, size)", "end = size"),
    "statement": ("memory:Memory.reserve", "A = max(A, X)", "pass", "end = max(end, size)", "pass"),
    "wildcards": ("memory:split", "A // B", "B // A", "rows // num_chunks", "num_chunks // rows"),
    "left out": ("memory:FIELDS", "'topk'", "", "'hidden_size', 'topk'", "'hidden_size',"),
    "except": ("memory:split", EXCEPT.format(0), EXCEPT.format(1), "return 0", "return 1"),
}


def planted(folder: Path, at: str, old: str, new: str) -> str:
    _, text = plant({"name": "a fault", "at": at, "old": old, "new": new}, folder)
    return text


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "memory.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize("name", FAULTS)
def test_an_edit(package: Path, name: str) -> None:
    at, old, new, line, changed = FAULTS[name]
    # As the planter writes it: without comments, in one format.
    clean = planted(package, "memory:split", "rows // num_chunks", "rows // num_chunks")
    assert line in clean
    assert planted(package, at, old, new) == clean.replace(line, changed)


def test_moved_renamed_and_formatted(package: Path) -> None:
    """A function is found in another file, by a new place too, and with other local names."""
    edit = ("max(A, B)", "B")
    before = planted(package, "memory:Memory.reserve", *edit)
    folder = package / "exchange"
    folder.mkdir()
    moved = (package / "memory.py").rename(folder / "arena.py")
    assert planted(package, "memory:Memory.reserve", *edit) == before

    text = SOURCE.replace("Memory", "Arena").replace("reserve", "allocate")
    text = text.replace("max(end, size)", "max(\n            end, size,\n            )")
    moved.write_text(text.replace("size", "length"))
    after = planted(package, "exchange.arena:Arena.allocate", *edit)
    renamed = before.replace("Memory", "Arena").replace("reserve", "allocate")
    assert after == renamed.replace("size", "length")


@pytest.mark.parametrize(
    ("at", "old", "found"),
    [
        ("memory:Memory.grow", "A", "memory:Memory.grow: found 0 times"),
        ("memory:split", "A % B", "memory:split: found 1 times, and 'A % B' in it 0 times"),
        ("memory:Memory.reserve", "end", "and 'end' in it 4 times"),
    ],
)
def test_not_there_once(package: Path, at: str, old: str, found: str) -> None:
    with pytest.raises(ValueError, match="must be once") as error:
        planted(package, at, old, old)
    assert found in str(error.value)
