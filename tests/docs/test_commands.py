"""Every command that README and docs show runs here, or stands in `KNOWN` with who runs it.

The commands of a page run in order in one folder that looks like the repository, each once for
all pages, and print what the page shows and quotes. `NOT_PRINTED` has blocks that none prints.
"""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from command_lines import check_arguments
from pages import PAGES, REPOSITORY, Shown, anchors, commands, links, name_of, paths, shown
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
# How blocks begin that were measured, come from the log of a training, or are drawn.
NOT_PRINTED = (
    "iteration   1,394 ms",
    "monta: auto, ranks",
    " node 0, rank 0",
)

EMULATE = r"monta emulate --nodes \d+ .* -- (monta|-m monta_megatron)"
# Pattern of the whole command -> whether it runs here, the test that runs it, or why none does.
KNOWN: dict[str, bool | str] = {
    r"monta plan --log .*": "tests/unit/planner/test_training_log.py",
    r"monta (doctor|plan .*)": True,
    r"python scripts/(launch_budget\.py --ep .*|claims\.py \w+)": True,
    r"monta timeline trace\.json": "tests/timeline/test_timeline.py",
    r"monta place --(trace trace|apply \w+) .*": "tests/unit/place/test_place_command.py",
    r"monta launch .* --dry-run": "tests/launch/test_run_configs.py",
    r"monta launch configs/runs/quickstart\.yaml": "tests/launch/test_start.py",
    r"monta compare (configs/runs/quickstart|run)\.yaml.*": "tests/launch/test_compare.py",
    rf"{EMULATE} calibrate .*": "tests/calibration/test_calibrate_command.py",
    rf"{EMULATE} bench .*": "tests/benchmark/test_bench_command.py",
    r"monta emulate .* -- benchmarks/ablation\.py .*": "tests/benchmark/test_ablation.py",
    r"(monta emulate .* -- |python )benchmarks/sweep\.py .*": "tests/benchmark/test_sweep.py",
    r"(job=\$\()?sbatch .*": "tests/slurm/test_slurm.py",
    r"scripts/quickstart\.sh": "tests/megatron/test_quickstart.py",
    r"scripts/gpu_check\.sh": "tests/unit/test_gpu_check.py",
    r"python3 -m venv \.venv-plan && .*|pip install --no-deps \. numpy pyyaml": (
        "tests/unit/test_distribution.py"
    ),
    r"scripts/megatron_suite\.py --checkout .*": "tests/dist/test_megatron_suite.py",
    r"scripts/property_tests\.py .*": "tests/dist/test_dispatcher_properties.py",
    r"(nsys profile .* )?torchrun \.\.\. pretrain_gpt\.py \.\.\. --profile .*": (
        "needs GPUs; tests/unit/test_stream_safety.py shows the ranges"
    ),
    r"torchrun \.\.\. pretrain_gpt\.py .*": "tests/megatron/test_pretrain_gpt.py",
    r"torchrun --nnodes 2 .*": "needs two machines",
    r"monta launch .* (--start sbatch|--data-path) .*": "needs nodes with GPUs",
    r"scripts/quickstart\.sh --pairs \d+": "a measurement of minutes, on a quiet machine",
    r"\.venv/bin/python scripts/quickstart/experts_pipelined\.py .*": "a measurement of minutes",
    r"(RATES=\S.* )?scripts/benchmark_sweep\.sh .*": "a measurement of hours",
    r"bash src/monta_megatron/tools/launch/start\.sh .*": "tests/slurm/test_on_slurm.py",
    r"(docker|apptainer) build .*|(docker run|apptainer exec) .* monta doctor": "needs containers",
    r"MONTA_PROJECT_URL=\S+ python -m build": "only a release has a URL",
    r"pip install .*|source \.venv/bin/activate|pre-commit install": "the tests run in it",
    r"(\w+=\S+ )*scripts/test\.sh.*|\.ci/run": "it runs this test",
}


def known(command: str) -> str | None:
    """The first pattern that describes a command."""
    return next((pattern for pattern in KNOWN if re.fullmatch(pattern, command)), None)


ALL = [(page, command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_known(page: Path) -> None:
    for command in commands(page):
        pattern = known(command)
        assert pattern is not None, f"{command}: say in KNOWN how it is run"
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
    result = run_python(*words, cwd=folder)
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    folders = (REPOSITORY, REPOSITORY / "src" / "monta_megatron", page.parent)
    missing = {path for path in paths(page) if not any((at / path).exists() for at in folders)}
    assert missing <= NOT_HERE
