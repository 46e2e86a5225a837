"""docs/options.md and docs/files.md name all there is, and the README's ratios were measured."""

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from commands import sub_parsers
from pages import REPOSITORY

from monta_megatron.integration.options import Options
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools.launch.run_config import RunConfig

sys.path.insert(0, str(REPOSITORY / "scripts"))

import readme_chart

OPTIONS = (REPOSITORY / "docs" / "options.md").read_text(encoding="utf-8")
FILES = (REPOSITORY / "docs" / "files.md").read_text(encoding="utf-8")
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


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
    assert (
        sorted(name for name in variables | options | commands if f"`{name}`" not in OPTIONS) == []
    )
    assert set(re.findall(r"^\| `(--[a-z-]+)`", OPTIONS, re.MULTILINE)) == options


@pytest.mark.parametrize("cls", [Cluster, RunConfig])
def test_keys_of_files_are_named(cls: Any) -> None:
    assert [field.name for field in fields(cls) if f"`{field.name}`" not in FILES] == []


def test_ratios_of_the_readme_were_measured() -> None:
    measured = [float(row["times faster"]) for row in readme_chart.results()]
    quoted = re.findall(r"(\d\.\d+) to (\d\.\d+) times", README)[0]
    for ratio in map(float, (*quoted, *re.findall(r"\((\d\.\d+) times as fast, emul", README))):
        assert any(round(m, 1) == ratio or m == ratio for m in measured), ratio


def test_the_chart_of_the_readme_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readme_chart.main([str(tmp_path / "chart.png")])
    assert (tmp_path / "chart.png").stat().st_size > 10_000
