"""The ```python blocks of a page run in order, in one process, and print what the page shows."""

import re
from pathlib import Path

import pytest
from pages import PAGES, REPOSITORY, name_of
from run_python import run_python

LIMIT_S = 240
RUN = ("docs/python_api.md",)
# The parts of files that the reader writes.
NOT_RUN = ("docs/adding_a_chain.md",)

# A block, and the output that is shown right below it, if any.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
MARK = "- - - block "


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def test_every_page_with_blocks_is_known() -> None:
    assert sorted(name_of(page) for page in PAGES if blocks(page)) == sorted(RUN + NOT_RUN)


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("name", RUN)
def test_blocks_run_and_print_what_is_shown(name: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    shown = blocks(REPOSITORY / name)
    program = "".join(f"print({MARK!r}, flush=True)\n{block}" for block, _ in shown)
    result = run_python("-c", program, cwd=tmp_path, limit_s=LIMIT_S, MONTA_CPU_RANKS="1")
    assert result.returncode == 0, result.stderr[-4000:]
    printed = result.stdout.split(f"{MARK}\n")[1:]
    for (block, output), found in zip(shown, printed, strict=True):
        # Megatron prints lines of its own in between.
        missing = [line for line in output.splitlines() if line not in found.splitlines()]
        assert not missing, f"{block}\nprints\n{found}"
