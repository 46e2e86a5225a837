#!/usr/bin/env python3
"""Plant the faults of tests/faults.yaml, one at a time, and report which of them the tests find.

    scripts/planted_faults.py [TEXT...]    all, or those with a text in their place or name
    scripts/planted_faults.py --check      only look for the code to change

The tests run without a fault first, because a test that fails anyway finds nothing.
"""

import argparse
import ast
import copy
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from time_limits import scaled

Nodes = list[ast.AST]
Bound = dict[str, ast.AST]

# Of one pytest run on an idle machine; ranks that wait for each other give up after a minute.
LIMIT_S = 300
# A name in an edit that stands for any expression.
WILDCARD = re.compile("[A-Z]")


def plant(fault: dict[str, Any], package: Path) -> tuple[Path, str]:
    """The file that a fault changes, and its text with the fault.

    Raises:
        ValueError: its code does not occur exactly once.
    """
    module, name = fault["at"].split(":")
    named = package.joinpath(*module.split("."))
    paths = [path for path in (named.with_suffix(".py"), named / "__init__.py") if path.is_file()]
    defined = find_definitions(paths, name) or find_definitions([*package.rglob("*.py")], name)
    old, new = parse_edit(fault["old"], fault["new"])
    found = [
        (path, tree, place) for path, tree, node in defined for place in find_places(node, old)
    ]
    if len(found) != 1:
        raise ValueError(
            f"{fault['name']}: {fault['at']}: found {len(defined)} times, and {fault['old']!r} in "
            f"it {len(found)} times, must be once"
        )
    path, tree, (parent, field, first, bound) = found[0]
    substitute = _Substitute(bound)
    replaced = [substitute.visit(copy.deepcopy(node)) for node in new]
    if isinstance(children := getattr(parent, field), list):
        children[first : first + len(old)] = replaced
    else:
        setattr(parent, field, replaced[0])
    return path, ast.unparse(tree)


def find_definitions(paths: list[Path], name: str) -> list[tuple[Path, ast.Module, ast.AST]]:
    """Functions, classes and constants called `name`, which may be `Class.method`.

    Returns:
        Of each: its file, the syntax tree of the file, and its node in that tree.
    """
    found = []
    for path in paths:
        tree = ast.parse(path.read_text())
        nodes: Nodes = [tree]
        for part in name.split("."):
            children = [child for node in nodes for child in ast.iter_child_nodes(node)]
            nodes = [child for child in children if part in names_defined_by(child)]
        found += [(path, tree, node) for node in nodes]
    return found


def names_defined_by(node: ast.AST) -> list[str]:
    """Names of a function, of a class, or of the variables that an assignment binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def parse_edit(old: str, new: str) -> tuple[Nodes, Nodes]:
    """Both sides of an edit: expressions if both are, else statements or `except` clauses."""
    sides: list[Nodes] = []
    for code in (old, new):
        if code.startswith("except "):
            (statement,) = ast.parse(f"try:\n    pass\n{code}").body
            assert isinstance(statement, ast.Try)
            sides.append([*statement.handlers])
        else:
            sides.append([*ast.parse(code).body])
    expressions = [[node.value for node in side if isinstance(node, ast.Expr)] for side in sides]
    if [len(side) for side in expressions] == [len(side) for side in sides]:
        return [*expressions[0]], [*expressions[1]]
    return sides[0], sides[1]


def find_places(scope: ast.AST, old: Nodes) -> Iterator[tuple[ast.AST, str, int, Bound]]:
    """All places below `scope` that match `old`: parent node, its field, index, and wildcards."""
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            children = value if isinstance(value, list) else [value]
            for first in range(len(children) - len(old) + 1):
                bound: Bound = {}
                if matches(old, children[first : first + len(old)], bound):
                    yield parent, field, first, bound


def matches(pattern: Any, code: Any, bound: Bound) -> bool:
    """Whether two syntax trees are equal. Wildcards of `pattern` are added to `bound`."""
    if isinstance(pattern, ast.Name) and WILDCARD.fullmatch(pattern.id):
        if not isinstance(code, ast.expr):
            return False
        return matches(bound.setdefault(pattern.id, code), code, bound)
    if type(pattern) is not type(code):
        return False
    if isinstance(pattern, ast.AST):
        # Whether a name is read or written follows from its place.
        fields = [field for field in pattern._fields if field != "ctx"]
        return all(matches(getattr(pattern, f), getattr(code, f), bound) for f in fields)
    if isinstance(pattern, list):
        pairs = zip(pattern, code, strict=False)
        return len(pattern) == len(code) and all(matches(*pair, bound) for pair in pairs)
    return bool(pattern == code)


class _Substitute(ast.NodeTransformer):
    """Replaces wildcards by what they stand for."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.bound.get(node.id, node)


def first_failure(tests: list[str], fault: dict[str, Any] | None = None) -> str | None:
    """The first test that fails, with a fault planted; None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree("src", source, ignore=shutil.ignore_patterns("__pycache__"))
        # Presets are found from the package.
        Path(folder, "configs").symlink_to(Path("configs").resolve())
        if fault is None:
            # Without comments, as where a fault is planted.
            for path in source.rglob("*.py"):
                path.write_text(ast.unparse(ast.parse(path.read_text())))
        else:
            path, text = plant(fault, source / "monta_megatron")
            path.write_text(text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        env = os.environ | {"PYTHONPATH": str(source), "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        pytest = Popen(command, env=env, stdout=PIPE, text=True, start_new_session=True)
        try:
            output, _ = pytest.communicate(timeout=None if fault is None else scaled(LIMIT_S))
        except TimeoutExpired:
            return f"the time limit of {scaled(LIMIT_S):.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pytest.pid, signal.SIGKILL)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if pytest.returncode != 0 and not failed:
        raise SystemExit(f"pytest ended with status {pytest.returncode}:\n{output}")
    return failed[0].split(" ", 1)[1].split(" - ")[0] if failed else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="in the place or name of a fault")
    parser.add_argument("--check", action="store_true", help="only look for the code to change")
    parser.add_argument("--no-clean", action="store_true", help="trust the tests without a fault")
    arguments = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[1])
    texts, listed = arguments.texts or [""], yaml.safe_load(Path("tests/faults.yaml").read_text())
    faults = [
        fault for fault in listed if any(text in fault["at"] + fault["name"] for text in texts)
    ]
    problems = []
    for fault in faults:
        try:
            plant(fault, Path("src/monta_megatron"))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise SystemExit("\n".join(problems))
    print(f"{len(faults)} faults can be planted", flush=True)
    if arguments.check or not faults:
        return
    tests = dict.fromkeys(test for fault in faults for test in fault["tests"])
    if not arguments.no_clean and (failed := first_failure(list(tests))):
        raise SystemExit(f"{failed} fails without a fault")
    num_found = 0
    for fault in faults:
        began_s = time.monotonic()
        test = first_failure(fault["tests"], fault)
        num_found += test is not None
        result = f"found {fault['name']} by {test}" if test else f"NOT FOUND {fault['name']}"
        print(f"{result} in {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"{num_found} of {len(faults)} faults found")


if __name__ == "__main__":
    main()
