"""Every command that README and docs show is run here, or stands here with the reason why not.

A command that no entry of `KNOWN` describes fails, and so does an entry that describes none. The
commands of a page run in order in one folder that looks like the repository, each once, and print
what the page shows and quotes. A block that no command prints here stands in `NOT_PRINTED`.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command_lines import check_arguments
from pages import (
    PAGES,
    REPOSITORY,
    Shown,
    add_own_model,
    anchors,
    commands,
    links,
    name_of,
    paths,
    shown,
)
from training_logs import published_log

from monta_megatron.cli import main
from monta_megatron.emulation import emulator
from monta_megatron.tools.launch import megatron_arguments

LIMIT_S = 120
# These start processes or need a shell.
NOT_IN_PROCESS = re.compile(r"(?!monta )|monta (emulate) |.*[>~$|]")
# A layout that fits, of a cluster that says how much memory a rank has.
PLANS = re.compile(r"monta (plan|simulate|timeline --model) ")
FITS = re.compile(r"needs [\d.]+ GB of a rank's [\d.]+ GB, at the least")
WIDTH = 80
# Of what is started on an emulated cluster: the smallest that has nodes of several ranks.
SMALL = {
    "--ranks-per-node": "2",
    "--experts": "4",
    "--top-k": "2",
    "--hidden": "16",
    "--tokens": "8",
}
BENCH_TESTS = "tests/benchmark/test_bench_command.py"
LAUNCH_TESTS = "tests/launch/test_start.py"
TIMELINE_TESTS = "tests/timeline/test_recorded.py"
CALIBRATE_TESTS = "tests/calibration/test_calibrate_command.py"

# Named on a page, but not of this repository: Megatron's, and what the reader writes.
NOT_HERE = {
    "megatron/training/arguments.py",
    "runs/NAME/run.sh",
    "src/monta_megatron/chains/rail_allgather.py",
    "tests/dist/test_rail_allgather.py",
}
# Pages of other projects, which sources of published figures name.
OTHERS_PAGES = r"docs/(legacy|README_Hybrid-EP)\.md$"
# Of a block that no command prints here, how it begins -> why.
MEASURED = "measured"
TRAINED = "from the log of a training"
DRAWN = "no output"
NOT_PRINTED = {
    "iteration   1,394 ms": MEASURED,
    "iteration      monta": MEASURED,
    "dispatcher    ms ratio": MEASURED,
    "monta: calibrated for": TRAINED,
    "monta: tuned over": TRAINED,
    "monta: since iteration": TRAINED,
    "exchange: alltoall_allgather": TRAINED,
    "status  what": "of one machine",
    " node 0, rank 0": DRAWN,
}


@dataclass(frozen=True, kw_only=True)
class Known:
    """How a command is checked.

    Attributes:
        pattern: of the whole command.
        sizes: flag -> value that takes the place of the page's, so that it runs anywhere, at once.
        more: flags that are added.
        status: its exit status.
        run_by: the test that runs it, where it is slow, or where another page runs it as well.
        reason: why it cannot be run here, true on every machine.
    """

    pattern: str
    sizes: Mapping[str, str] = field(default_factory=dict)
    more: str = ""
    status: int = 0
    run_by: str | None = None
    reason: str | None = None

    @property
    def runs(self) -> bool:
        """Whether it is run here."""
        return self.run_by is None and self.reason is None

    def smaller(self, command: str) -> str:
        """The command with the sizes that are run."""
        for flag, value in self.sizes.items():
            command = re.sub(rf"(?<= ){flag} \S+", f"{flag} {value}", command)
        return f"{command} {self.more}".strip()


EMULATE = r"monta emulate --nodes \d+ .* -- (monta|-m monta_megatron\.cli)"
KNOWN = (
    Known(
        pattern=r"monta (doctor|estimate .*|new .*|plan (?!.* traces/).*|report .*|simulate .*"
        r"|timeline --model .*)"
    ),
    Known(
        pattern=r"monta place --(trace trace|apply \w+) .*",
        run_by="tests/unit/place/test_place_command.py",
    ),
    Known(
        pattern=r"python benchmarks/clustered_traces\.py .*|monta (place|plan) .* traces/.*",
        run_by="tests/unit/place/test_clustered_traces.py",
    ),
    Known(pattern=r"monta doctor --log .*"),
    Known(pattern=r"monta launch .* --dry-run"),
    Known(
        pattern=rf"{EMULATE} calibrate --out cluster.yaml", sizes=SMALL, more="--budget-seconds 1"
    ),
    Known(
        pattern=rf"{EMULATE} bench .* --cluster cluster.yaml",
        sizes=SMALL,
        more="--repeats 1 --warmup 0 --chains auto --num-chunks 2 --phase forward",
    ),
    Known(pattern=rf"{EMULATE} bench .*", run_by=BENCH_TESTS),
    Known(
        pattern=r"monta emulate --nodes \d+ .* -- benchmarks/(ablation|bound|wire)\.py .*",
        run_by="tests/benchmark/test_ablation_and_bound.py",
    ),
    Known(
        pattern=r"(monta emulate --nodes \d+ .* -- |python )benchmarks/sweep\.py .*",
        run_by="tests/benchmark/test_sweep.py",
    ),
    Known(
        pattern=r"scripts/quickstart\.sh --pairs \d+"
        r"|MONTA_CPU_RANKS=1 .* scripts/quickstart/(eight_bits|experts_pipelined)\.py .*"
        r"|(RATES=\S.* )?scripts/benchmark_sweep\.sh .*"
        r"|python scripts/launch_budget\.py --host",
        reason="a measurement of minutes, on a quiet machine",
    ),
    Known(pattern=rf"{EMULATE} calibrate .*", run_by=CALIBRATE_TESTS),
    Known(pattern=rf"{EMULATE} timeline --record .*", run_by=TIMELINE_TESTS),
    Known(
        pattern=r"monta timeline recorded( --stock recorded_stock)?",
        run_by="tests/timeline/test_training_recording.py",
    ),
    Known(
        pattern=r"monta launch --config configs/runs/quickstart\.yaml( -- .*watch-steps.*)?"
        r"|monta doctor --run .*",
        run_by=LAUNCH_TESTS,
    ),
    # Rows are past their tolerance.
    Known(pattern=r"python benchmarks/validate\.py", status=1),
    Known(
        pattern=r"python benchmarks/fit_estimate\.py",
        run_by="tests/unit/estimate/test_validate.py",
    ),
    Known(
        pattern=r"monta compare --config (configs/runs/quickstart|run)\.yaml",
        run_by="tests/launch/test_compare.py",
    ),
    Known(pattern=r"(job=\$\()?sbatch .*", run_by="tests/slurm/test_slurm.py"),
    Known(
        pattern=r"monta launch .* (--start sbatch|--data-path) .*", reason="needs nodes with GPUs"
    ),
    Known(pattern=r"export MASTER_ADDR=.*|srun .* --container-.*", reason="needs containers"),
    Known(
        pattern=r"(docker|apptainer) build .*|(docker run|apptainer exec) .* monta doctor",
        reason="needs containers",
    ),
    Known(pattern=r"MONTA_PROJECT_URL=\S+ python -m build", reason="only a release has a URL"),
    Known(pattern=r"scripts/quickstart\.sh", run_by="tests/megatron/test_quickstart.py"),
    Known(
        pattern=r"(nsys profile .* )?torchrun \.\.\. pretrain_gpt\.py \.\.\. --profile .*",
        reason="needs GPUs; tests/timeline/test_recorded.py shows the ranges",
    ),
    Known(
        pattern=r"torchrun \.\.\. pretrain_gpt\.py .*", run_by="tests/megatron/test_pretrain_gpt.py"
    ),
    Known(pattern=r"torchrun --nnodes 2 .*", reason="needs two machines"),
    Known(
        pattern=r"python3 -m venv \.venv-plan && source .*|pip install --no-deps \. numpy pyyaml",
        run_by="tests/unit/test_distribution.py",
    ),
    Known(
        pattern=r"pip install .*|source \.venv/bin/activate|pre-commit install",
        reason="the tests run in what it makes",
    ),
    Known(
        pattern=r"scripts/megatron_suite\.py --checkout .*",
        run_by="tests/dist/test_megatron_suite.py",
    ),
    Known(
        pattern=r"scripts/property_tests\.py .*",
        run_by="tests/dist/test_dispatcher_properties.py",
    ),
    Known(
        pattern=r"((MONTA_ALLOW_ANY_MEGATRON|PYTHONPATH|MEGATRON_LM_DIR)=\S+ )*"
        r"scripts/test\.sh.*|\.ci/run",
        reason="it runs this test",
    ),
)


def known(command: str) -> Known | None:
    """What is known of a command: the first entry that describes it."""
    return next((entry for entry in KNOWN if re.fullmatch(entry.pattern, command)), None)


ALL = [(page, command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{name_of(p)}: {c[:40]}" for p, c in ALL])
def test_every_command_is_known(page: Path, command: str) -> None:
    entry = known(command)
    assert entry is not None, f"{command}: say in KNOWN how it is run"
    if entry.run_by is not None:
        assert (REPOSITORY / entry.run_by.split("::")[0]).is_file()
    script = re.match(r"(?:\w+=\S+ )*((?:scripts|\.ci)/\S+)", command)
    if script is not None:
        assert os.access(REPOSITORY / script[1], os.X_OK)
    if command.startswith("monta ") or "monta_megatron.cli " in command:
        check_arguments(command)


OF_MEGATRON = sorted({command for _, command in ALL if "pretrain_gpt.py ..." in command})


@pytest.mark.parametrize("command", OF_MEGATRON)
def test_flags_of_a_training_are_megatrons(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.training", reason="needs megatron-core[training]")
    preset = REPOSITORY / "configs" / "clusters" / "h100_8x_ndr.yaml"
    (tmp_path / "cluster.yaml").write_bytes(preset.read_bytes())
    monkeypatch.chdir(tmp_path)
    _, _, flags = command.partition("pretrain_gpt.py ...")
    words = [[f"--{flag}", *values] for flag, *values in map(str.split, flags.split(" --")[1:])]
    answer = megatron_arguments.check([["--num-experts", "8"], *words])
    assert answer.problem is None and answer.unchecked is None


def test_every_entry_is_of_use() -> None:
    used = {id(known(command)) for _, command in ALL}
    assert [entry.pattern for entry in KNOWN if id(entry) not in used] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository and may be written to."""
    folder = tmp_path_factory.mktemp("repository")
    for path in REPOSITORY.iterdir():
        if path.name in ("benchmarks", "configs", "docs", "scripts", "src"):
            (folder / path.name).symlink_to(path)
    add_own_model(folder)
    (folder / "train.log").write_text(published_log("F4"))
    return folder


RUN_HERE = [
    page for page in PAGES if shown(page) or any(known(c) and known(c).runs for c in commands(page))
]
_printed: dict[str, str] = {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_commands_of_a_page_run_and_print_what_it_shows(
    folder: Path,
    page: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    quoted = [part for part in shown(page) if not _why_not_printed(part.text)]
    for command in [*commands(page), *(part.command for part in quoted if part.quotes)]:
        entry = known(command)
        if entry is None or not entry.runs:
            continue
        smaller = entry.smaller(command)
        if smaller not in _printed:
            if smaller.startswith("monta emulate"):
                _need_namespaces()
            if NOT_IN_PROCESS.match(smaller):
                _printed[smaller] = _run(smaller, entry.status, folder)
            else:
                _printed[smaller] = _run_here(smaller, entry.status, capsys)
            _check(smaller, _printed[smaller])
        if PLANS.match(command) and command in commands(page):
            words = " ".join(_printed[smaller].split())
            assert FITS.search(words), f"{command}: show a layout that fits"
    for part in quoted:
        assert part.command in _printed, f"{part.text}: say in NOT_PRINTED why none prints it"
        printed = _printed[part.command]
        missing = part.missing(printed)
        assert not missing, f"{missing}: not printed by {part.command}"


def _why_not_printed(text: str) -> str | None:
    return next((why for start, why in NOT_PRINTED.items() if text.startswith(start)), None)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_comments_are_not_shown(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [held for held in re.findall("<!--(.*?)-->", text, re.DOTALL) if "--" in held] == []
    assert not re.search(r"[^\n]\n<!--", text), "the paragraph above ends there"


PRINTED = """\
choice    alltoall_dedup in 2 chunks: 2,080 (1,731 to 3,493) us, dispatch +
          combine, forward + backward
benefit   1.27x stock alltoall: saves 2.08 ms
layer: 2 rows, 0 past
"""


@pytest.mark.parametrize(
    ("text", "quotes", "missing"),
    [
        ("benefit   1.27x stock alltoall: saves 2.08 ms\n...\n", False, []),
        ("layer: 2 rows, 0 past\n...\nbenefit   1.27x", False, ["benefit   1.27x"]),
        ("benefit   1.28x stock\n", False, ["benefit   1.28x stock\n"]),
        (" in 2 chunks 1.27x as fast as H100s, 2,080 us.", True, []),
        (" is 1.28x as fast, in 2,080 us.", True, ["1.28"]),
        ("`2,080 (1,731 to 3,493) us, dispatch + combine`", True, []),
        ("`2,080 (1,730 to 3,493) us`, `alltoall`", True, ["2,080 (1,730 to 3,493) us"]),
        ("\n| rows | past |\n|---|---|\n| layer | 2 | 0 |", True, []),
        ("\n| layer | 0 | 2 |", True, ["| layer | 0 | 2 |"]),
    ],
)
def test_what_is_not_printed_is_found(text: str, quotes: bool, missing: list[str]) -> None:
    assert Shown(command="", text=text, quotes=quotes).missing(PRINTED) == missing


def test_every_block_that_is_not_printed_is_on_a_page() -> None:
    texts = [part.text for page in PAGES for part in shown(page)]
    assert [b for b in NOT_PRINTED if not any(text.startswith(b) for text in texts)] == []


def _run_here(command: str, expected: int, capsys: pytest.CaptureFixture[str]) -> str:
    try:
        status = main(shlex.split(command)[1:])
    except SystemExit as stop:
        status = int(str(stop.code))
    printed = capsys.readouterr()
    assert status == expected, f"{command}\n{printed.out[-2000:]}\n{printed.err[-4000:]}"
    return printed.out


def _check(command: str, printed: str) -> None:
    if "--json" in command:
        json.loads(printed)
    elif re.match("monta (?!launch)", command):
        # That one prints a script.
        wide = [line for line in printed.splitlines() if len(line) > WIDTH]
        assert wide == [], f"{command}: wider than {WIDTH} columns"


def _run(command: str, expected: int, folder: Path) -> str:
    # What is written below ~ stays here; what libraries keep there is used.
    caches = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "HOME": str(folder),
        "XDG_CACHE_HOME": caches,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    said = f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    assert result.returncode == expected, said
    return result.stdout


def _need_namespaces() -> None:
    try:
        emulator.unshare_command()
    except ValueError as error:
        pytest.skip(f"monta emulate: {error}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        f"{target.name}#{anchor}"
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert broken == []


def test_pages_that_other_files_name_exist() -> None:
    folders = ("benchmarks", "configs", "containers", "scripts", "src", "tests")
    missing = {
        f"{path.relative_to(REPOSITORY)}: {page}"
        for folder in folders
        for path in (REPOSITORY / folder).rglob("*.*")
        if path.suffix in (".py", ".sh", ".yaml", ".sbatch", ".def")
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(encoding="utf-8"))
        if not (REPOSITORY / page).is_file()
    }
    assert {name for name in missing if not re.search(OTHERS_PAGES, name)} == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    folders = (REPOSITORY, REPOSITORY / "src" / "monta_megatron", page.parent)
    missing = {path for path in paths(page) if not any((at / path).exists() for at in folders)}
    assert missing <= NOT_HERE


def test_every_page_is_linked_from_an_index() -> None:
    indexes = [REPOSITORY / name for name in ("README.md", "docs/README.md")]
    indexes += [page for page in PAGES if page.name == "README.md" and page not in indexes]
    linked = {target for page in indexes for target, _ in links(page)}
    assert [name_of(page) for page in PAGES if page not in linked and page not in indexes] == []
