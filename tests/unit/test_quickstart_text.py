"""The quickstart's own text: what cannot be trained on is refused before anything is written."""

from pathlib import Path

import pytest
from run_python import run_python

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
    result = run_python(SCRIPT, "--text", "text.txt", cwd=tmp_path, MONTA_CPU_RANKS="1")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("quickstart.sh: error: --text: text.txt: ")
    assert said in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ([] if content is None else ["text.txt"])
