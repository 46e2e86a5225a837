"""No example of --help plans a layout that does not fit into a rank's memory, and no page a run.

`test_commands` says the same of the plans of README and docs.
"""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_lines import monta_arguments
from pages import PAGES, REPOSITORY, add_own_model, commands, joined_lines

from monta_megatron.cli import build_parser, main, sub_parsers
from monta_megatron.tools.launch.prepare import prepare

PLANS = re.compile(r"monta (plan|simulate|timeline --model) ")
LAUNCHES = re.compile(r"monta launch --config (\S+)")


def of_help() -> Iterator[str]:
    """The examples of all commands, as typed."""
    for parser in sub_parsers(build_parser()).values():
        assert parser.epilog is not None
        yield from (line.removeprefix("example: ") for line in joined_lines(parser.epilog))


ON_PAGES = [command for page in PAGES for command in commands(page)]
EXAMPLES = [*ON_PAGES, *of_help()]
PLANNED = sorted({command for command in of_help() if PLANS.match(command)} - {*ON_PAGES})
RUNS = sorted({match[1] for command in EXAMPLES if (match := LAUNCHES.match(command))})


def memories(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What `plan`, `simulate` and `timeline` say of memory with --json."""
    points = document.get("points", [document])
    return [point.get("memory") or point["about"]["memory"] for point in points]


@pytest.mark.parametrize("command", PLANNED)
def test_a_planned_layout_fits(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    add_own_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    (words,) = monta_arguments(command)
    assert "--ignore-memory" not in words, "show a layout that exists"
    assert main([*words, *(() if "--json" in words else ("--json",))]) == 0
    document = json.loads(capsys.readouterr().out)
    for memory in memories(document):
        assert not memory["ignored"] and memory["available_bytes"] is not None
        assert 0 < memory["needed_bytes"] <= memory["available_bytes"]


@pytest.mark.parametrize("file", RUNS)
def test_a_launched_run_fits(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_LM_DIR", raising=False)
    run = prepare(str(REPOSITORY / file), [], None, dry_run=True)
    assert run.memory is not None and run.memory.fits
    # CPU ranks have no memory of their own.
    assert run.memory.available_bytes is not None or "quickstart" in file


def test_there_are_examples_of_each() -> None:
    kinds = {shlex.split(command)[1] for command in PLANNED}
    assert kinds == {"plan", "simulate", "timeline"} and len(RUNS) > 1
    assert "--ignore-memory" not in " ".join(EXAMPLES)
