"""README and docs: their pages, the commands and blocks of output on them, links between them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "configs").rglob("*.md")),
]

SHELLS = ("bash", "sh", "shell")
# Behind a blank line; an item of a list is indented by less, or begins with its mark.
INDENTED = r"(?<=\n\n)(?:(?: {4}[^\n]*|)\n)+"
IN_TEXT = re.compile(rf"(?P<shell>{INDENTED})|(?P<heading>^#+ )", flags=re.MULTILINE)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```\n?", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of output.

    Attributes:
        command: whose, or the block of Python right above it; None where none is above it in its
            section.
        text: lines of it, with `...` for those that are left out.
        start, end: where the text stands in the page.
    """

    command: str | None
    text: str
    start: int
    end: int


def name_of(page: Path) -> str:
    """As it is written in links: docs/plans.md."""
    return page.relative_to(REPOSITORY).as_posix()


def commands(page: Path) -> list[str]:
    """The shell commands of a page, one line each: in blocks marked as shell, or indented ones.

    Blocks of output and of other languages are fenced and bear no shell's name.
    """
    return [part for part in _parts(page) if isinstance(part, str)]


def blocks(page: Path) -> list[Block]:
    """The blocks of output of a page, in order."""
    return [part for part in _parts(page) if isinstance(part, Block)]


def links(page: Path) -> list[tuple[Path, str]]:
    """The files that it links to, itself among them, each with an anchor or an empty text."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    parts = [target.partition("#") for target in targets if "://" not in target]
    return [((page.parent / path).resolve() if path else page, name) for path, _, name in parts]


def anchors(page: Path) -> set[str]:
    """The anchors that its headings get on GitHub."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def paths(page: Path) -> list[str]:
    """The source files that a page names in backticks, with a folder."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|sh|sbatch))`", text)


def joined_lines(text: str) -> list[str]:
    """The lines of a piece of shell, each with those that a backslash continues it with."""
    return [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines() if line]


def _parts(page: Path) -> Iterator[str | Block]:
    """Commands, and the blocks of their output, in the page's order."""
    text = page.read_text(encoding="utf-8")
    last: str | None = None
    end = 0
    for fenced in FENCED.finditer(text):
        for last in _outside(text[end : fenced.start()]):
            if last is not None:
                yield last
        language, block = fenced.groups()
        end = fenced.end()
        if language in SHELLS:
            for last in _commands(block):
                yield last
        elif language == "python":
            last = block
        elif language == "":
            yield Block(command=last, text=block, start=fenced.start(2), end=fenced.end(2))
    yield from filter(None, _outside(text[end:]))


def _outside(text: str) -> Iterator[str | None]:
    """The commands between two blocks; None where a heading begins another section."""
    for match in IN_TEXT.finditer(f"\n\n{text}\n"):
        if match["shell"] is None:
            yield None
        else:
            yield from _commands(match["shell"])


def _commands(block: str) -> Iterator[str]:
    for line in joined_lines(block):
        command = re.sub(r"(^|\s)#.*", "", line).strip()
        if command:
            yield command
