"""Every command that README and docs show runs here, or known_commands.yaml says who runs it.

The commands of a page run in order in one folder that looks like the repository, each once for
all pages.
"""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml
from command_lines import check_arguments
from pages import PAGES, REPOSITORY, anchors, commands, links, name_of, paths
from published_configs import CONFIGS
from run_python import run_python

from monta_megatron.cli import main
from monta_megatron.tools.launch import megatron_arguments

# Named on a page, but not of this repository: Megatron's, and what the reader writes.
NOT_HERE = {
    "runs/NAME/run.sh",
    "src/monta_megatron/chains/rail_allgather.py",
    "tests/dist/test_rail_allgather.py",
}
BESIDE = Path(__file__).parent
# Pattern of the whole command -> whether it runs here, the test that runs it, or why none does.
KNOWN: dict[str, bool | str] = yaml.safe_load((BESIDE / "known_commands.yaml").read_text())


def known(command: str) -> str | None:
    """The first pattern that describes a command."""
    return next((pattern for pattern in KNOWN if re.fullmatch(pattern, command)), None)


ALL = [(page, command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_known(page: Path) -> None:
    for command in commands(page):
        pattern = known(command)
        assert pattern is not None, f"{command}: say in known_commands.yaml how it is run"
        how = KNOWN[pattern]
        assert how is True or not str(how).startswith("tests/") or (REPOSITORY / str(how)).is_file()
        script = re.match(r"(?:\w+=\S+ )*((?:scripts|\.ci)/\S+)", command)
        assert script is None or os.access(REPOSITORY / script[1], os.X_OK)
        if command.startswith("monta ") or "-m monta_megatron " in command:
            check_arguments(command)


def test_every_entry_is_of_use() -> None:
    assert set(KNOWN) == {known(command) for _, command in ALL}


OF_MEGATRON = sorted({command for _, command in ALL if "pretrain_gpt.py ..." in command})


def test_flags_of_a_training_are_megatrons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.training", reason="needs megatron-core[training]")
    preset = REPOSITORY / "configs" / "clusters" / "h100_8x_ndr.yaml"
    (tmp_path / "cluster.yaml").write_bytes(preset.read_bytes())
    monkeypatch.chdir(tmp_path)
    for command in OF_MEGATRON:
        _, _, flags = command.partition("pretrain_gpt.py ...")
        answer = megatron_arguments.check(["--num-experts", "8", *flags.split()])
        assert answer.megatron is not None and answer.problem is None, command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository and may be written to."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("configs", "scripts", "src", "tests"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "config.json").write_text(json.dumps(CONFIGS["mixtral_8x7b"]), encoding="utf-8")
    return folder


def runs_here(command: str | None) -> bool:
    return command is not None and KNOWN.get(known(command) or "") is True


RUN_HERE = [page for page in PAGES if any(map(runs_here, commands(page)))]
_ran: set[str] = set()


@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_commands_of_a_page_run(
    folder: Path,
    page: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    for command in commands(page):
        if runs_here(command) and command not in _ran:
            _run(command, folder)
            _ran.add(command)


def _run(command: str, folder: Path) -> None:
    name, *words = shlex.split(command)
    if name == "monta":
        assert main(words) == 0, command
    else:
        result = run_python(*words, cwd=folder)
        assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        f"{target.name}#{anchor}"
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    folders = (REPOSITORY, REPOSITORY / "src" / "monta_megatron", page.parent)
    missing = {path for path in paths(page) if not any((at / path).exists() for at in folders)}
    assert missing <= NOT_HERE
