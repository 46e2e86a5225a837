"""Files that a user names, and files written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def read_text(path: str | Path, form: str) -> str:
    """The text of a file that a user names.

    Args:
        path: the file.
        form: what it has to hold, for messages, such as "YAML".

    Raises:
        ValueError: it cannot be read, or is no text.
    """
    try:
        # Some editors write a byte order mark.
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no text file (UTF-8), must be {form}") from error


def read(path: str | Path) -> Any:
    """Read the plain data in a file of one JSON document.

    Raises:
        ValueError: the file cannot be read or is no such document; one line.
    """
    try:
        return json.loads(read_text(path, "JSON"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is no JSON in line {error.lineno}: {error.msg}") from error


def read_json_lines(path: Path) -> list[Any]:
    """The documents in a file, without a last line that was cut short; none if there is no file.

    Raises:
        ValueError: the file cannot be read, or has a line that is no JSON document.
    """
    documents = list[Any]()
    for line in read_text(path, "JSON lines").splitlines(keepends=True) if path.exists() else ():
        try:
            if line.endswith("\n"):
                documents.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}: must hold one JSON document per line; line {len(documents) + 1} is none"
            ) from error
    return documents


def add_json_line(path: Path, entry: Any) -> None:
    """Append one document; the file has to end with a whole line, or not to exist."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, so that it exists whole or not at all.

    One that exists keeps its mode.

    Raises:
        ValueError: it cannot be written, or something that is no file bears its name.
    """
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: cannot be written: is no regular file")
        try:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            if path.exists():
                temporary.chmod(path.stat().st_mode)
            temporary.replace(path)
        finally:
            # It still exists only if something went wrong.
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from error


def make_folder(folder: Path, flag: str) -> None:
    """Make the folder that a flag names, if it does not exist.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag}: got {folder}, cannot be made: {error.strerror}") from error
