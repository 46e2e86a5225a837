"""README and docs: their pages, the commands on them, what these print, the links between them.

A block of output belongs to the command above it in its section. Numbers that a page quotes from a
command stand behind a comment that names it, up to the next comment or the end of the paragraph,
item or table row:

    <!-- monta plan model=MODEL tp=2 json= -->`2.11x stock alltoall`, 3,495 us<!-- / -->

Flags are written so because many readers of Markdown take no comment that holds two hyphens.
Texts in backticks are printed so; other numbers are printed somewhere. A comment on a line of its
own is for what is below it: a block, which has numbers of the output, or a table, whose rows have
each the numbers of a line, in order. Text does not go on with a comment at the start of a line,
which would end the paragraph.
"""

import re
from collections.abc import Iterator, Sequence
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
QUOTE = (
    r"<!-- (?P<command>(?:monta|python) [^>]*?) -->"
    r"(?P<quoted>(?:\n\|[^\n]*)+|.*?(?=<!--|\n\n|\n\||\n- |\Z))"
)
IN_TEXT = re.compile(
    rf"(?P<shell>{INDENTED})|{QUOTE}|(?P<heading>^#+ )", flags=re.MULTILINE | re.DOTALL
)
# No part of a name, such as H100 or 235B; 2.11x is a number.
NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?=x?(?![\w]))")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a page shows of a command's output.

    Attributes:
        command: whose; None where none stands above it in its section.
        text: lines of it, with `...` for those that are left out; or what quotes it.
        quotes: whether it quotes numbers, in place of whole lines.
    """

    command: str | None
    text: str
    quotes: bool

    def missing(self, printed: str) -> list[str]:
        """Parts of the text that the output does not have."""
        if not self.quotes:
            position, missing = 0, []
            for part in re.split(r"^\.\.\.\n", self.text, flags=re.MULTILINE):
                found = f"\n{printed}".find(f"\n{part}", position)
                position = max(found, position)
                missing += [part] if found < 0 else []
            return missing
        if self.text.startswith("\n|"):
            lines = [NUMBER.findall(line) for line in printed.splitlines()]
            rows = {row: NUMBER.findall(row) for row in self.text.split("\n")}
            return [
                row
                for row, numbers in rows.items()
                if not any(_holds_in_order(line, numbers) for line in lines)
            ]
        # A line may be broken in another place.
        printed, text = (" ".join(words.split()) for words in (printed, self.text))
        verbatim = [part for part in re.findall("`(.+?)`", text) if NUMBER.search(part)]
        numbers = NUMBER.findall(re.sub("`.+?`", "", text))
        known = {*NUMBER.findall(printed)}
        return [
            *(part for part in verbatim if part not in printed),
            *(number for number in numbers if number not in known),
        ]


def _holds_in_order(line: Sequence[str], numbers: Sequence[str]) -> bool:
    rest = iter(line)
    return all(number in rest for number in numbers)


def name_of(page: Path) -> str:
    """As it is written in links: docs/plans.md."""
    return page.relative_to(REPOSITORY).as_posix()


def commands(page: Path) -> list[str]:
    """The shell commands of a page, one line each: in blocks marked as shell, or indented ones.

    Blocks of output and of other languages are fenced and bear no shell's name.
    """
    return [part for part in _parts(page) if isinstance(part, str)]


def shown(page: Path) -> list[Shown]:
    """What a page shows of what commands print, in order; outputs of Python blocks left out."""
    return [part for part in _parts(page) if isinstance(part, Shown)]


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


def _parts(page: Path) -> Iterator[str | Shown]:
    """Commands, and what is shown of their output, in the page's order."""
    text = page.read_text(encoding="utf-8")
    parts = re.split(r"^```(\w*)\n(.*?)^```\n?", text, flags=re.MULTILINE | re.DOTALL)
    last: str | None = None
    quoted, before = False, ""
    # Text, language, block, text, language, block, ..., text.
    for position, part in enumerate(parts):
        if position % 3 == 0:
            quoted = False
            for match in IN_TEXT.finditer(f"\n\n{part}\n"):
                if match["shell"] is not None:
                    for last in _commands(match["shell"]):
                        yield last
                elif match["command"] is None:
                    last = None
                elif match["quoted"].strip():
                    command = _command_of_quote(match["command"])
                    yield Shown(command=command, text=match["quoted"], quotes=True)
                else:
                    # Right above a block.
                    last, quoted = _command_of_quote(match["command"]), True
        elif position % 3 == 2 and parts[position - 1] in SHELLS:
            for last in _commands(part):
                yield last
        elif position % 3 == 2 and parts[position - 1] == "" and before != "python":
            yield Shown(command=last, text=part, quotes=quoted)
        if position % 3 == 2:
            before = parts[position - 1]


def _command_of_quote(text: str) -> str:
    return " ".join(re.sub(r"(?<=\s)([a-z-]+)=", r"--\1 ", text).split())


def _commands(block: str) -> Iterator[str]:
    for line in joined_lines(block):
        command = re.sub(r"(^|\s)#.*", "", line).strip()
        if command:
            yield command
