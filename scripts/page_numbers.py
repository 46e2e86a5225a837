#!/usr/bin/env python
"""Write what commands print into README and docs anew: blocks of output, and numbers in texts.

    scripts/page_numbers.py            # write the pages
    scripts/page_numbers.py --check    # name those that are stale, with exit status 1

A block of output belongs to the command, or the block of Python, above it in its section. Lines of
`...` stand for those that it leaves out: the part below begins where the output has its first word
again, and, if another such line follows, has as many entries as before (an indented line belongs
to the entry above it). docs/numbers.yaml says which command prints the numbers in texts and tables.
"""

import argparse
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "docs"))

from pages import PAGES, blocks, name_of  # noqa: E402

NUMBERS = REPOSITORY / "docs" / "numbers.yaml"
# How blocks begin that were measured, come from the log of a training, or are drawn.
NOT_PRINTED = ("iteration   1,394 ms", "monta: auto, ranks", " node 0, rank 0")
LEFT_OUT = "...\n"
PLACE = re.compile(r"\\{(\w+)\\}|\\\.\\\.\\\.|(?:\\?\s)+")


def written(page: Path) -> str:
    """The text that a page should have.

    Raises:
        ValueError: a command fails or does not print what the page shows of it.
    """
    text = page.read_text(encoding="utf-8")
    for block in reversed(list(blocks(page))):
        if not block.text.startswith(NOT_PRINTED):
            if block.command is None:
                raise ValueError(f"{name_of(page)}: no command above the block\n{block.text}")
            output = printed(block.command)
            text = text[: block.start] + shown(block.text, output) + text[block.end :]
    for entry in yaml.safe_load(NUMBERS.read_text(encoding="utf-8")):
        for passage in entry["pages"].get(name_of(page), []):
            text = with_numbers(text, passage, numbers(entry))
    return text


@functools.cache
def printed(command: str) -> str:
    """The output of a command of `monta` or `python`, or of lines of Python."""
    if "\n" in command:
        words = [sys.executable, "-c", command]
    else:
        name, *arguments = shlex.split(command)
        words = [sys.executable, *(["-m", "monta_megatron"] if name == "monta" else []), *arguments]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"{command}: {done.stderr}")
    return done.stdout


def shown(block: str, output: str) -> str:
    """A block with the lines of the output."""
    lines = output.splitlines(keepends=True)
    parts = re.split(rf"^{re.escape(LEFT_OUT)}", block, flags=re.MULTILINE)
    renewed, position = [], 0
    for index, part in enumerate(parts):
        begin, end = position, len(lines)
        if part and index > 0:
            word = part.split()[0]
            while begin < end and lines[begin].split()[:1] != [word]:
                begin += 1
            if begin == end:
                raise ValueError(f"no line of the output begins with {word!r}:\n{output}")
        if index < len(parts) - 1:
            end = begin
            for _ in entries(part.splitlines()):
                end += len(next(entries(lines[end:]), []))
        renewed.append("".join(lines[begin:end]) if part else "")
        position = end if part else begin
    return LEFT_OUT.join(renewed)


def entries(lines: list[str]) -> Iterator[list[str]]:
    """Each line that is not indented, with the indented ones below it."""
    entry: list[str] = []
    for line in lines:
        if entry and not line.startswith(" "):
            yield entry
            entry = []
        entry.append(line)
    if entry:
        yield entry


def numbers(entry: dict[str, Any]) -> dict[str, str]:
    """The words and numbers of a command's output, by the names that `printed` gives them."""
    output = printed(entry["command"])
    found: dict[str, str] = {}
    for line in entry["printed"]:
        match = re.search(pattern(line), output, re.DOTALL)
        if match is None:
            raise ValueError(f"{entry['command']} does not print {line!r}:\n{output}")
        found |= match.groupdict()
    return found


def with_numbers(text: str, passage: str, found: dict[str, str]) -> str:
    """The text with new numbers in a passage."""
    matches = list(re.finditer(pattern(passage), text, re.DOTALL))
    if len(matches) != 1:
        raise ValueError(f"{len(matches)} places read {passage!r}, in place of one")
    spans = [(matches[0].span(name), found[name]) for name in matches[0].groupdict()]
    for (begin, end), number in sorted(spans, reverse=True):
        text = text[:begin] + number + text[end:]
    return text


def pattern(template: str) -> str:
    """What finds a template: {name} is a word or number, `...` anything."""

    def place(match: re.Match[str]) -> str:
        if match[1]:
            return rf"(?P<{match[1]}>\w(?:[\w.,]*\w)?)"
        return r".*?" if match[0] == r"\.\.\." else r"\s+"

    return PLACE.sub(place, re.escape(template))


def stale() -> list[Path]:
    """The pages that show what is no longer printed."""
    return [page for page in PAGES if page.read_text(encoding="utf-8") != written(page)]


def main() -> int:
    """Write the pages, or name the stale ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, name the stale pages")
    check = parser.parse_args().check
    pages = stale()
    for page in pages:
        if not check:
            page.write_text(written(page), encoding="utf-8")
        print(f"{name_of(page)}: " + ("stale: run scripts/page_numbers.py" if check else "written"))
    return 1 if check and pages else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
