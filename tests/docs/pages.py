"""What README and docs hold: their pages, the shell commands on them, the links between them."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from published_configs import CONFIGS

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "configs").rglob("*.md")),
    *sorted((REPOSITORY / "scripts").rglob("*.md")),
]

SHELLS = ("bash", "sh", "shell")
# Behind a blank line; an item of a list is indented by less, or begins with its mark.
INDENTED = re.compile(r"(?<=\n\n)(?:(?: {4}.*|)\n)+")


def add_own_model(folder: Path) -> None:
    """The `config.json` that pages name as the reader's own: Mixtral's."""
    (folder / "config.json").write_text(json.dumps(CONFIGS["mixtral_8x7b"]), encoding="utf-8")


def name_of(page: Path) -> str:
    """As it is written in links: docs/plans.md."""
    return page.relative_to(REPOSITORY).as_posix()


def commands(page: Path) -> list[str]:
    """The shell commands of a page, one line each: in blocks marked as shell, or indented ones.

    Blocks of output and of other languages are fenced and bear no shell's name.
    """
    text = page.read_text(encoding="utf-8")
    return [command for block in _shell_blocks(text) for command in _commands(block)]


def links(page: Path) -> list[str]:
    """The targets of its links to other files, without anchors."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    return [target for target in targets if "://" not in target]


def paths(page: Path) -> list[str]:
    """The source files that a page names in backticks, with a folder."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|sh|sbatch))`", text)


def joined_lines(text: str) -> list[str]:
    """The lines of a piece of shell, each with those that a backslash continues it with."""
    return [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines() if line]


def _shell_blocks(text: str) -> Iterator[str]:
    parts = re.split(r"^```(\w*)\n(.*?)^```\n?", text, flags=re.MULTILINE | re.DOTALL)
    # Text, language, block, text, language, block, ..., text.
    for position, part in enumerate(parts):
        if position % 3 == 0:
            yield from INDENTED.findall(f"\n\n{part}\n")
        elif position % 3 == 2 and parts[position - 1] in SHELLS:
            yield part


def _commands(block: str) -> Iterator[str]:
    for line in joined_lines(block):
        command = re.sub(r"(^|\s)#.*", "", line).strip()
        if command:
            yield command


def check_current(page: Path, script: Path, *arguments: str) -> None:
    """A generated page is what its script prints with these arguments."""
    printed = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=280
    )
    assert printed.returncode == 0, printed.stderr
    assert page.read_text(encoding="utf-8") == printed.stdout, (
        f"{page.name} is old: python scripts/{script.name} --write"
    )
