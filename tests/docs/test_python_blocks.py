"""The ```python blocks of docs/python_api.md run in order, and print what the page shows."""

import re
from pathlib import Path

import pytest
from pages import REPOSITORY
from run_python import run_python

LIMIT_S = 240
PAGE = REPOSITORY / "docs" / "python_api.md"
# A block, and the output that is shown right below it, if any.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
MARK = "- - - block "


@pytest.mark.timeout(LIMIT_S + 10)
def test_blocks_run_and_print_what_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    shown = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert shown
    program = "".join(f"print({MARK!r}, flush=True)\n{block}" for block, _ in shown)
    result = run_python("-c", program, cwd=tmp_path, limit_s=LIMIT_S, MONTA_CPU_RANKS="1")
    assert result.returncode == 0, result.stderr[-4000:]
    printed = result.stdout.split(f"{MARK}\n")[1:]
    for (block, output), found in zip(shown, printed, strict=True):
        # Megatron prints lines of its own in between.
        missing = [line for line in output.splitlines() if line not in found.splitlines()]
        assert not missing, f"{block}\nprints\n{found}"
