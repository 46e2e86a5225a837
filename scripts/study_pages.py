#!/usr/bin/env python
"""Write docs/claims.md and docs/studies from the cost model: what is predicted of open questions.

    python scripts/study_pages.py topologies    # print one page
    python scripts/study_pages.py --write       # write all of them, and draw their pictures
    python scripts/study_pages.py --write scale # or one

Nothing is measured here. A test fails if a page differs from what this prints; drawing needs
matplotlib (the `plot` extra).
"""

import argparse
from pathlib import Path

from studies import claims, contention, scale, sequences, topologies

DOCS = Path(__file__).parents[1] / "docs"
# Name -> the module that makes it, and its page.
STUDIES = {
    "claims": (claims, DOCS / "claims.md"),
    "topologies": (topologies, DOCS / "studies" / "topologies.md"),
    "contention": (contention, DOCS / "studies" / "contention.md"),
    "sequences": (sequences, DOCS / "studies" / "sequences.md"),
    "scale": (scale, DOCS / "studies" / "scale.md"),
}


def main() -> None:
    """Print a page, or write them."""
    parser = argparse.ArgumentParser(description="Write the pages of studies.")
    parser.add_argument("name", nargs="*", choices=[[], *STUDIES], help="all, if none is given")
    parser.add_argument("--write", action="store_true", help="write pages and pictures")
    parsed = parser.parse_args()
    for name in parsed.name or STUDIES:
        module, path = STUDIES[name]
        if parsed.write:
            path.write_text(module.page(), encoding="utf-8")
            module.draw(DOCS / "pictures" / f"{name}.png")
        else:
            print(module.page(), end="")


if __name__ == "__main__":
    main()
