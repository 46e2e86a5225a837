"""A fresh interpreter, run to its end."""

import os
import subprocess
import sys
from pathlib import Path

from time_limits import scaled

LIMIT_S = 120


def run_python(
    *words: str | Path, cwd: Path | None = None, limit_s: float = LIMIT_S, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """`python WORDS`, with such variables besides this process's; warnings are not printed."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True,
        text=True,
        timeout=scaled(limit_s),
    )
