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


def check_can_be_written(path: Path, name: str) -> None:
    """Refuse a path, given as `name`, that is a folder or in a folder that cannot be written.

    Raises:
        ValueError: one line.
    """
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{name}: got {path}, must be a file in a folder that can be written")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, so that it exists whole or not at all.

    Raises:
        OSError: it cannot be written.
        ValueError: something that is no file bears its name.
    """
    # Root would replace /dev/null.
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: cannot be written: is no regular file")
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        # It still exists only if something went wrong.
        temporary.unlink(missing_ok=True)
