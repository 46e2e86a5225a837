"""Every comparison of the dispatcher type in the installed Megatron is in dispatcher_type.yaml."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.old_end

FIELD = "moe_token_dispatcher_type"
# Why each may stay -> module and function of Megatron.
COMPARISONS = yaml.safe_load(Path(__file__).with_name("dispatcher_type.yaml").read_text())


def comparisons(node: ast.AST, within: str = "") -> Iterator[tuple[str, str]]:
    """(qualified function, comparison) for everything that compares the field, below a node."""
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{within}.{child.name}".lstrip(".")
        elif isinstance(child, ast.Compare | ast.Match):
            compared = ast.unparse(child.subject if isinstance(child, ast.Match) else child)
            if re.search(rf"(?<!inference_){FIELD}", compared):
                yield within, compared
        yield from comparisons(child, inner)


def comparisons_of_megatron() -> dict[str, str]:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations
    found = {}
    for root in spec.submodule_search_locations:
        for path in Path(root).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            if FIELD in source:
                module = ".".join(("megatron", *path.relative_to(root).with_suffix("").parts))
                for function, text in comparisons(ast.parse(source)):
                    found[f"{module}:{function}"] = text
    return found


def test_every_comparison_in_the_installed_megatron_is_listed() -> None:
    listed = {place for places in COMPARISONS.values() for place in places}
    found = comparisons_of_megatron()
    assert found, "no comparison found: the search itself is broken"
    unknown = {place: text for place, text in found.items() if place not in listed}
    assert not unknown, f"Megatron compares {FIELD} in new places: {unknown}"


FORMS = """
def equal(c): return c.moe_token_dispatcher_type == 'flex'
def contained(c): return 'x' in (c.moe_token_dispatcher_type,)
def looked_up(c): return getattr(c, 'moe_token_dispatcher_type') != 'alltoall'
def matched(c):
    match c.moe_token_dispatcher_type:
        case 'a': pass
def another_field(c): return c.inference_moe_token_dispatcher_type == 'nvls'
"""


def test_a_new_comparison_is_found() -> None:
    found = [function for function, _ in comparisons(ast.parse(FORMS))]
    assert found == ["equal", "contained", "looked_up", "matched"]
