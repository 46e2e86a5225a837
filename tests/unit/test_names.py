"""Names of tests are short enough to be read in a list."""

import ast
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
