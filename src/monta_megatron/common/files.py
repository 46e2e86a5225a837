"""Files written whole or not at all, files of JSON lines, and JSON from other programs.

Files of lines grow during a long measurement. A killed process leaves at most one truncated line,
at the end, which is not read.
"""

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from monta_megatron.common.text import shown


def read_text(path: str | Path, form: str, most_bytes: int) -> str:
    """The text of a file that a user names.

    Args:
        path: the file.
        form: what it has to hold, for messages, such as "YAML".
        most_bytes: the size from which it is refused.

    Raises:
        ValueError: it cannot be read, is larger, or is no text.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ValueError(f"{path}: is too large, must hold at most {most_bytes:,} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no text file (UTF-8), must be {form}") from error


def read_json_lines(path: Path) -> list[Any]:
    """The documents in a file, without a last line that was cut short; none if there is no file.

    Raises:
        ValueError: the file cannot be read, or has a line that is no JSON document.
    """
    documents = list[Any]()
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    documents.append(json.loads(line))
        return documents
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no text file (UTF-8), must be JSON lines") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: must hold one JSON document per line; line {len(documents) + 1} is none"
        ) from error


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
    # No one else can know the name, and whatever has it all the same, a link too, is not opened.
    temporary = path.parent / f".{os.urandom(8).hex()}.tmp"
    try:
        mode = _mode_of(path)
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600
        )
        try:
            with open(descriptor, "wb") as file:
                if mode is not None:
                    os.fchmod(descriptor, mode)
                file.write(content.encode() if isinstance(content, str) else content)
            temporary.replace(path)
        finally:
            # It still exists only if something went wrong.
            with suppress(OSError):
                temporary.unlink()
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from error


def _mode_of(path: Path) -> int | None:
    """The permissions of a file; None if there is none.

    Raises:
        ValueError: it is no file, such as a folder, a pipe or /dev/null.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: cannot be written: is no regular file")
    return stat.S_IMODE(mode)


def make_folder(folder: Path, flag: str) -> None:
    """Make the folder that a flag names, if it does not exist.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag}: got {folder}, cannot be made: {error.strerror}") from error


# A config.json holds some kB; the longest lists of quantized layers take some hundred.
MOST_BYTES = 1_000_000


def read(path: str | Path, most_bytes: int = MOST_BYTES) -> Any:
    """Read the plain data in a file of one JSON document.

    Args:
        path: the file.
        most_bytes: the size from which it is refused.

    Raises:
        ValueError: the file cannot be read, is too large or is no such document; one line.
    """
    # Some editors write a byte order mark.
    text = read_text(path, "JSON", most_bytes).removeprefix("\ufeff")
    try:
        return json.loads(text, parse_int=_integer, object_pairs_hook=_mapping)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is no JSON in line {error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: is no JSON that can be read: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON that can be read: {error}") from error


def _integer(text: str) -> int:
    # Python refuses to write out the longest ones, in an error too.
    if len(text) > 18:
        raise ValueError(f"an integer of {len(text)} characters, must have at most 18")
    return int(text)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {shown(repr(twice)[:60])} is written twice")
    return mapping
