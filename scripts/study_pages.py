#!/usr/bin/env python
"""Write docs/claims.md from the cost model: claims of papers, and predictions of open questions.

    python scripts/study_pages.py topologies    # print one section
    python scripts/study_pages.py --write       # write the page, and draw its pictures

Nothing is measured here. A test fails if the page differs from what this prints; drawing needs
matplotlib (the `plot` extra).
"""

import argparse
import re
from pathlib import Path
from types import ModuleType

from studies import claims, contention, scale, sequences, topologies

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "claims.md"
STUDIES: dict[str, ModuleType] = {
    "claims": claims,
    "topologies": topologies,
    "contention": contention,
    "sequences": sequences,
    "scale": scale,
}
# A heading, its table's two lines of head, its rows.
TABLE = r"### (.*)\n\n(\|.*)\n(\|.*)\n((?:\|.*\n)+)"
LEFT = ("| of |", "| --- |")
HEAD = """\
# Claims and studies

What is **predicted** here comes from the presets of `configs/clusters/`, which hold published
figures; a calibrated file gives better ones. `python scripts/study_pages.py` prints this page, and
a test keeps it current.
"""


def section(name: str) -> str:
    """A section of the page: what a study says, tables of one head joined."""
    text = STUDIES[name].section().rstrip() + "\n"
    return re.sub(rf"(?:{TABLE}\n){{2,}}", lambda match: joined(match[0]), text)


def joined(tables: str) -> str:
    """Tables of one head that follow each other as one, with their headings in its first column."""
    parts = re.findall(TABLE, tables)
    if len({head for _, head, _, _ in parts}) > 1:
        return tables
    lines = [re.sub(r"^\|", cell, line) for line, cell in zip(parts[0][1:3], LEFT, strict=True)]
    for title, _, _, rows in parts:
        first, *others = rows.splitlines()
        lines += [f"| {title} {first}", *(f"| {row}" for row in others)]
    return "\n".join(lines) + "\n\n"


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *map(section, STUDIES)])


def main() -> None:
    """Print the page or some sections, or write it."""
    parser = argparse.ArgumentParser(description="Write the page of claims and studies.")
    parser.add_argument("name", nargs="*", choices=[[], *STUDIES], help="all, if none is given")
    parser.add_argument("--write", action="store_true", help="write the page and its pictures")
    parsed = parser.parse_args()
    if parsed.write:
        PAGE.write_text(page(), encoding="utf-8")
        for name in parsed.name or STUDIES:
            STUDIES[name].draw(DOCS / "pictures" / f"{name}.png")
    else:
        print("\n".join(map(section, parsed.name)) if parsed.name else page(), end="")


if __name__ == "__main__":
    main()
