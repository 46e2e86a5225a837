"""docs/options.md is what the code says, and names every variable that the code reads."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pages import REPOSITORY, check_current

SCRIPT = REPOSITORY / "scripts" / "options_page.py"
PAGE = REPOSITORY / "docs" / "options.md"


def test_the_page_is_current() -> None:
    check_current(PAGE, SCRIPT)


def texts(path: Path) -> Iterator[str]:
    """Where the name of a variable may stand: in Python's texts, anywhere in a shell script."""
    if path.suffix == ".sh":
        yield path.read_text(encoding="utf-8")
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_page_names_every_variable() -> None:
    named = {
        name
        for folder in ("src", "scripts")
        for path in (REPOSITORY / folder).rglob("*.*")
        for text in texts(path)
        for name in re.findall(r"\b\w*MONTA_[A-Z_]+\b", text)
    }
    page = PAGE.read_text(encoding="utf-8")
    assert len(named) > 5
    assert sorted(name for name in named if f"`{name}`" not in page) == []
