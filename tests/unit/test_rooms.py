"""The arrows between rooms: so a training imports no tool, no plot and no command line."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "monta_megatron"

# A room, which is a package or a file, and those that it may import, all of them below it.
ARROWS = {
    "cli": "tools integration calibration emulation planner exchange chains common core",
    "api": "tools integration exchange planner common core",
    "tools": "integration calibration emulation exchange planner chains common core",
    "integration": "emulation exchange planner chains common core",
    "calibration": "exchange planner chains common core",
    "emulation": "planner chains common core",
    "exchange": "chains common core",
    "planner": "chains common core",
    "chains": "common core",
    "common": "core",
    "core": "",
}
# Files that belong to a room.
ROOM_OF = {"__main__": "cli", "autoload": "integration"}


def imports(tree: ast.AST) -> Iterator[str]:
    """Our rooms that a module imports, anywhere in it but for types alone."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        names = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.module is not None and child.level == 0, "a relative import"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
        for name in names:
            package, _, inside = name.partition(".")
            if package == PACKAGE.name:
                yield inside.partition(".")[0]
        yield from imports(child)


def room_of(name: str) -> str:
    return ROOM_OF.get(name, name)


def test_every_import_is_an_arrow() -> None:
    # The package's own `__init__` is in no room, as all are in it.
    names = {path.stem for path in PACKAGE.iterdir()} - {"__init__"}
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name in names:
            room = room_of(name)
            found = {
                room_of(each) for each in imports(ast.parse(path.read_text())) if each in names
            }
            not_allowed = found - {room, *ARROWS[room].split()}
            missing += [f"{path.relative_to(PACKAGE)} imports {each}" for each in not_allowed]
    assert not missing, "no arrow:\n" + "\n".join(missing)
