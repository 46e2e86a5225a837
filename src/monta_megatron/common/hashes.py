"""A hash of plain values that all ranks agree on."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def hash_of(values: Mapping[str, Any]) -> int:
    """63 bits of a mapping of plain values, the same in every process."""
    text = json.dumps(values, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
