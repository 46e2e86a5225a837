"""Files that are written whole or not at all, and files that grow during a long measurement.

The latter hold one JSON document per line. A process that is killed leaves at most one truncated
line, at the end, which is not read.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[Any]:
    """The documents in a file; none if there is no file.

    Raises:
        ValueError: the file cannot be read, or has a line that is no JSON document.
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
    """Write a file of JSON lines, replacing what it held.

    Raises:
        ValueError: it cannot be written.
    """
    write_whole(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def add_json_line(path: Path, entry: Any) -> None:
    """Append one document; the file has to end with a whole line, or not to exist."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, so that it exists whole or not at all.

    Raises:
        ValueError: it cannot be written.
    """
    temporary = path.parent / f".{path.name}.tmp"
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        # It still exists only if something went wrong.
        with suppress(OSError):
            temporary.unlink()


def make_folder(folder: Path, flag: str) -> None:
    """Make the folder that a flag names, if it does not exist.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag}: got {folder}, cannot be made: {error.strerror}") from error
