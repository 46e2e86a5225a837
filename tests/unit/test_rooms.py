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


def module_of(path: Path) -> str:
    """src/monta_megatron/cli/__init__.py -> monta_megatron.cli."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


PATHS = {module_of(path): path for path in PACKAGE.rglob("*.py")}


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs in a module, sooner or later."""
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from nodes(child)


def imports(module: str) -> set[str]:
    """Our modules that a module imports, anywhere in it."""
    names = set()
    for node in nodes(ast.parse(PATHS[module].read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, f"{module}: a relative import"
            # What is imported from a package may be a module of it.
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.add(name if name in PATHS else node.module)
    return names & PATHS.keys() - {module}


def room_of(module: str) -> str:
    name = module.split(".")[1]
    return ROOM_OF.get(name, name)


def test_every_import_is_an_arrow() -> None:
    # The package's own `__init__` is in no room, as all are in it.
    modules = {module for module in PATHS if "." in module}
    missing = [
        f"{module} imports {imported}"
        for module in sorted(modules)
        for imported in sorted(imports(module) & modules)
        if room_of(imported) not in (room_of(module), *ARROWS[room_of(module)].split())
    ]
    assert not missing, "no arrow:\n" + "\n".join(missing)
