"""Files that are whole or not there, and files that grow while something long is measured.

The latter hold one JSON document per line. A process that is killed leaves at most one line cut
short, at the end, which is not read.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[Any]:
    """The documents of a file; none where there is no file.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: must hold one JSON document per line") from error


def write_json_lines(path: Path, entries: Iterable[Any]) -> None:
    """Write a file anew.

    Raises:
        ValueError: it cannot be written.
    """
    write_whole(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def add_json_line(path: Path, entry: Any) -> None:
    """Add one document; the file ends with a whole line, or is not there."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        ValueError: it cannot be written.
    """
    temporary = path.parent / f".{path.name}.tmp"
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        # There only where something came in between.
        with suppress(OSError):
            temporary.unlink()


def make_folder(folder: Path, flag: str) -> None:
    """Make a folder that a flag names, where it is not there.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag}: got {folder}, cannot be made: {error.strerror}") from error
