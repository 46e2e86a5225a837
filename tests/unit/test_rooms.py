"""The rooms of CONTRIBUTING.md against the imports in src, and what a training run imports.

The drawing there is the only place that names the rooms.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src" / "monta_megatron"
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text()
MOST_ROOMS = 15
# On one level of a room, `__init__` included.
MOST_FILES = 18

# Where PyTorch and Megatron enter; what else a training run imports follows from these.
ENTRIES = (
    "monta_megatron.autoload",
    "monta_megatron.integration.registration",
    "monta_megatron.integration.layer",
    "monta_megatron.integration.dispatcher",
)
# Lines that are not empty.
MOST_LINES_OF_A_TRAINING_RUN = 8000


def module_of(path: Path) -> str:
    """src/monta_megatron/cli/__init__.py -> monta_megatron.cli."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


PATHS = {module_of(path): path for path in PACKAGE.rglob("*.py")}


def nodes(tree: ast.AST, at_import: bool) -> Iterator[ast.AST]:
    """What runs in a module, sooner or later; or only while it is imported."""
    for child in ast.iter_child_nodes(tree):
        never_runs = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        runs_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if not never_runs and not (at_import and runs_later):
            yield child
            yield from nodes(child, at_import)


def imports(module: str, at_import: bool = False) -> set[str]:
    """Our modules that a module imports, anywhere in it or only while it is imported itself."""
    names = set()
    for node in nodes(ast.parse(PATHS[module].read_text()), at_import):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, f"{module}: a relative import"
            # What is imported from a package may be a module of it.
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.add(name if name in PATHS else node.module)
    return names & PATHS.keys() - {module}


def drawing() -> dict[str, tuple[set[str], set[str]]]:
    """By room, its packages and files on the first level, and the rooms that it may import.

    A line is `room -> rooms`, or `room (files) -> rooms` where files stand beside the package or
    instead of it; it goes on where the next one is indented.
    """
    (block,) = re.findall(r"```text\n(.*?->.*?)```", CONTRIBUTING, re.DOTALL)
    rooms = {}
    for line in re.sub(r"\n +", " ", block).splitlines():
        match = re.fullmatch(r"(\w+)(?: +\(([\w, ]+)\))? *->([\w, ]*)", line)
        assert match, f"CONTRIBUTING.md: {line!r} is not `room (files) -> rooms`"
        files, imported = (set(re.findall(r"\w+", text or "")) for text in match.groups()[1:])
        of_that_name = any((PACKAGE / name).exists() for name in (match[1], f"{match[1]}.py"))
        rooms[match[1]] = (files | {match[1]} if of_that_name else files, imported)
    return rooms


# The package's own `__init__` is in no room, as all are in it.
FIRST_LEVEL = {module: module.split(".")[1] for module in PATHS if "." in module}


def test_every_package_and_file_is_in_one_of_few_rooms() -> None:
    rooms = drawing()
    drawn = [name for names, _ in rooms.values() for name in names]
    unlike = sorted({*drawn} ^ {*FIRST_LEVEL.values()})
    assert not unlike, f"only in src or only in CONTRIBUTING.md: {', '.join(unlike)}"
    assert len(drawn) == len(set(drawn)), "one of them is in two rooms"
    assert len(rooms) <= MOST_ROOMS


def test_every_room_has_its_paragraph() -> None:
    assert [room for room in drawing() if f"\n- **{room}**" not in CONTRIBUTING] == []


def test_a_room_may_import_only_those_below_it() -> None:
    """So that there are no circles."""
    rooms = drawing()
    names = list(rooms)
    for position, (room, (_, imported)) in enumerate(rooms.items()):
        above = imported - set(names[position + 1 :])
        assert not above, f"{room} -> {', '.join(sorted(above))}: not drawn below {room}"


def test_every_import_is_an_arrow_of_the_drawing() -> None:
    rooms = drawing()
    room_of = {name: room for room, (names, _) in rooms.items() for name in names}
    missing = []
    for module, name in FIRST_LEVEL.items():
        room = room_of[name]
        for imported in imports(module) & FIRST_LEVEL.keys():
            other = room_of[FIRST_LEVEL[imported]]
            if other != room and other not in rooms[room][1]:
                missing.append(f"{room} -> {other}: {module} imports {imported}")
    assert not missing, "not drawn in CONTRIBUTING.md:\n" + "\n".join(sorted(missing))


def test_no_module_reaches_itself() -> None:
    """By lazy imports neither; the root, which offers the Python API, is imported by none."""
    arrows = {module: imports(module) for module in FIRST_LEVEL}
    upwards = sorted(module for module, below in arrows.items() if "monta_megatron" in below)
    assert upwards == [], "they import the package's root"
    for module in arrows:
        reached, waiting = set(), [*arrows[module]]
        while waiting:
            below = waiting.pop()
            if below not in reached:
                reached.add(below)
                waiting += arrows.get(below, ())
        assert module not in reached, f"{module} imports itself through {sorted(arrows[module])}"


def test_no_level_has_many_files() -> None:
    levels = Counter(path.parent for path in PATHS.values())
    assert {level.name: number for level, number in levels.items() if number > MOST_FILES} == {}


def imported_by_a_training_run() -> set[str]:
    """All that is imported once the entries are, with the packages around it."""
    waiting, imported = list(ENTRIES), set()
    while waiting:
        module = waiting.pop()
        if module not in imported:
            imported.add(module)
            waiting += imports(module, at_import=True)
            waiting += [module.rpartition(".")[0]] if "." in module else []
    return imported


def test_a_training_run_imports_few_lines() -> None:
    lines = {
        module: sum(bool(line.strip()) for line in PATHS[module].read_text().splitlines())
        for module in imported_by_a_training_run()
    }
    total = sum(lines.values())
    table = "\n".join(f"{count:6} {module}" for module, count in sorted(lines.items()))
    assert total <= MOST_LINES_OF_A_TRAINING_RUN, f"lines by module:\n{table}\n{total:6}"
