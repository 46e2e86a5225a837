"""What commands print, kept beside the tests; UPDATE_GOLDEN=1 writes it anew for a diff."""

import os
from pathlib import Path


def check(path: Path, printed: str) -> None:
    """Compare a text with the file that holds it."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(printed, encoding="utf-8")
    assert printed == path.read_text(encoding="utf-8")
