"""Every command of `monta` that README and docs show parses, and runs where it can.

The commands of a page run in order in one folder that looks like the repository, each once for
all pages, and print what the page shows and quotes. `NOT_PRINTED` has blocks that none prints.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import check_arguments
from pages import PAGES, REPOSITORY, Shown, anchors, commands, links, name_of, shown
from published_configs import CONFIGS

from monta_megatron.cli import main
from monta_megatron.tools.launch import megatron_arguments

LIMIT_S = 120
# How blocks begin that were measured, come from the log of a training, or are drawn.
NOT_PRINTED = (
    "iteration   1,394 ms",
    "iteration      monta",
    "monta: auto, EP 8",
    "status  what",
    " node 0, rank 0",
)

# Those that take seconds and need nothing; tests of their own run the others.
RUNS_HERE = re.compile(
    r"monta (doctor|plan (?!--log).*|timeline --model .*)"
    r"|python scripts/launch_budget\.py --(ep .*|host)"
)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_parses(page: Path) -> None:
    for command in commands(page):
        script = re.match(r"(?:\w+=\S+ )*((?:scripts|\.ci)/\S+)", command)
        assert script is None or os.access(REPOSITORY / script[1], os.X_OK)
        if command.startswith("monta ") or "monta_megatron.cli " in command:
            check_arguments(command)


def test_flags_of_a_training_are_megatrons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.training", reason="needs megatron-core[training]")
    preset = REPOSITORY / "configs" / "clusters" / "h100_8x_ndr.yaml"
    (tmp_path / "cluster.yaml").write_bytes(preset.read_bytes())
    monkeypatch.chdir(tmp_path)
    all_flags = {
        command.partition("pretrain_gpt.py ...")[2] for page in PAGES for command in commands(page)
    }
    for flags in sorted(all_flags - {""}):
        answer = megatron_arguments.check(["--num-experts", "8", *flags.split()])
        assert answer.megatron is not None and answer.problem is None, flags


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository and may be written to."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("configs", "scripts", "src", "tests"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "config.json").write_text(json.dumps(CONFIGS["mixtral_8x7b"]), encoding="utf-8")
    return folder


def runs_here(command: str | None) -> bool:
    return command is not None and RUNS_HERE.fullmatch(command) is not None


RUN_HERE = [page for page in PAGES if shown(page) or any(map(runs_here, commands(page)))]
_printed: dict[str, str] = {}


@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_commands_of_a_page_run_and_print_what_it_shows(
    folder: Path,
    page: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    quoted = [part for part in shown(page) if not part.text.startswith(NOT_PRINTED)]
    for command in [*commands(page), *(part.command for part in quoted if part.quotes)]:
        if runs_here(command) and command not in _printed:
            _printed[command] = _run(command, folder, capsys)
    for part in quoted:
        assert part.command in _printed, f"{part.text}: say in NOT_PRINTED why none prints it"
        missing = part.missing(_printed[part.command])
        assert not missing, f"{missing}: not printed by {part.command}"


def _run(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    name, *words = shlex.split(command)
    if name == "monta":
        assert main(words) == 0, command
        return capsys.readouterr().out
    result = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


PRINTED = """\
choice    alltoall_dedup in 2 chunks: 2,080 (1,731 to 3,493) us, dispatch +
          combine, forward + backward
benefit   1.27x stock alltoall: saves 2.08 ms
"""


@pytest.mark.parametrize(
    ("text", "quotes", "missing"),
    [
        ("benefit   1.27x stock alltoall: saves 2.08 ms\n...\n", False, []),
        ("benefit   1.28x stock\n", False, ["benefit   1.28x stock\n"]),
        (" in 2 chunks 1.27x as fast as H100s, 2,080 us.", True, []),
        (" is 1.28x as fast, in 2,080 us.", True, ["1.28"]),
        ("`2,080 (1,730 to 3,493) us`, `alltoall`", True, ["2,080 (1,730 to 3,493) us"]),
        ("\n| chunks | us |\n|---|---|\n| 2 | 2,080 |", True, []),
        ("\n| 2,080 | 2 |", True, ["| 2,080 | 2 |"]),
    ],
)
def test_missing_output_is_found(text: str, quotes: bool, missing: list[str]) -> None:
    assert Shown(command="", text=text, quotes=quotes).missing(PRINTED) == missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        f"{target.name}#{anchor}"
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert broken == []
