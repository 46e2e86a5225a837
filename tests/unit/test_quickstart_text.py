"""The quickstart's own text: what cannot be trained on is refused before anything is written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart" / "main.py"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        (b"", "is empty, must hold text to train on"),
        (b" \n\t\n", "is empty, must hold text to train on"),
        (b"\xff\xfe", "must be UTF-8 text"),
    ],
)
def test_bad_text_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    command = [sys.executable, str(SCRIPT), "--text", "text.txt"]
    environment = {**os.environ, "MONTA_CPU_RANKS": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("quickstart.sh: error: --text: text.txt: ")
    assert said in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ([] if content is None else ["text.txt"])
