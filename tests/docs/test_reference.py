"""docs/reference.md names every option, command, variable and key, and its Python blocks run."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from commands import sub_parsers
from pages import REPOSITORY
from run_python import run_python

from monta_megatron.integration.options import Options
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools.launch.run_config import RunConfig

PAGE = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
LIMIT_S = 240
# A block, and the output that is shown right below it, if any.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
MARK = "- - - block "


def test_options_commands_and_variables_are_named() -> None:
    patterns = {".py": r"""["'](MONTA_[A-Z_]+)["']""", ".sh": r"\bMONTA_[A-Z_]+\b"}
    variables = {
        name
        for folder in ("src", "scripts")
        for path in (REPOSITORY / folder).rglob("*.*")
        if path.suffix in patterns
        for name in re.findall(patterns[path.suffix], path.read_text(encoding="utf-8"))
    }
    options = {f"--moe-monta-{field.name.replace('_', '-')}" for field in fields(Options)}
    commands = {f"monta {name}" for name in sub_parsers()}
    assert [name for name in variables | options | commands if f"`{name}`" not in PAGE] == []
    assert set(re.findall(r"^\| `(--moe-[a-z-]+)`", PAGE, re.MULTILINE)) == options


@pytest.mark.parametrize("cls", [Cluster, RunConfig])
def test_keys_of_files_are_named(cls: Any) -> None:
    assert [field.name for field in fields(cls) if f"`{field.name}`" not in PAGE] == []


@pytest.mark.timeout(LIMIT_S + 10)
def test_blocks_run_and_print_what_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    shown = BLOCK.findall(PAGE)
    assert shown
    program = "".join(f"print({MARK!r}, flush=True)\n{block}" for block, _ in shown)
    result = run_python("-c", program, cwd=tmp_path, limit_s=LIMIT_S, MONTA_CPU_RANKS="1")
    assert result.returncode == 0, result.stderr[-4000:]
    printed = result.stdout.split(f"{MARK}\n")[1:]
    for (block, output), found in zip(shown, printed, strict=True):
        # Megatron prints lines of its own in between.
        missing = [line for line in output.splitlines() if line not in found.splitlines()]
        assert not missing, f"{block}\nprints\n{found}"
