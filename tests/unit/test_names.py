"""Names of tests are short enough to be read in a list; those of their files differ."""

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
MOST_CHARACTERS = 60


def test_names_of_tests_have_at_most_60_characters() -> None:
    names = [
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 500
    assert [name for name in names if len(name) > MOST_CHARACTERS] == []


def test_no_two_test_files_have_the_same_name() -> None:
    """They are imported by it."""
    counts = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, number in counts.items() if number > 1] == []
