"""JSON that another program wrote, as plain data, with errors in one line."""

import json
from pathlib import Path
from typing import Any

from monta_megatron.common.files import read_text
from monta_megatron.common.texts import shown

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
