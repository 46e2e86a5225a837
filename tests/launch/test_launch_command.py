"""`monta launch` before anything starts: what wins over what, what it writes, and bad input."""

import difflib
import json
import sys
from pathlib import Path
from typing import Any

import golden
import pytest
import yaml
from commands import Monta
from published_configs import CONFIGS as PUBLISHED
from run_files import CONFIGS, MIXTRAL, QUICKSTART, edited

from monta_megatron.tools.launch import start
from monta_megatron.tools.launch.prepare import Run, checked, prepare
from monta_megatron.tools.launch.start import choose_start, run_script, start_command

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MEGATRON_LM_DIR", raising=False)


def ready(file: str, *words: str) -> Run:
    return prepare(file, words, None, dry_run=True)


def document_of(run: Run) -> dict[str, Any]:
    """The document of its plan."""
    assert run.plan is not None
    return run.plan.document()


def described(run: Run) -> list[str]:
    """run.sh, notes, and what is planned for."""
    lines = [*run_script(run).splitlines(), *(f"note: {note}" for note in run.notes)]
    if run.plan is not None:
        shape, at = run.plan.shape, f"{run.plan.chain} in {run.plan.num_chunks} on"
        lines.append(f"plan: {at} {run.plan.cluster}, nodes {shape.layout.nodes}")
        lines.append(f"plan: {shape.tokens_per_rank} tokens of a rank")
    names = {sys.executable: "PYTHON", Path().absolute(): "FOLDER", CONFIGS.parent: "REPOSITORY"}
    for path, name in names.items():
        lines = [line.replace(str(path), name) for line in lines]
    return lines


def test_words_win_over_the_file(tmp_path: Path) -> None:
    """Lines that they remove and add, and sizes of the layout.

    Defaults are under the file, and that under the words, of which a parallel size changes the
    layout. EP 2 on nodes of 3: ranks 2-3 alone, in the middle, lie on two nodes. Hosts of 4 ranks
    share the link of their rack, of which a job may use a part.
    """

    def answer(command: str) -> str:
        start_of, _, words = command.partition(" -- ")
        _, name, *layout = start_of.split()
        file = str(CONFIGS / "runs" / f"{name}.yaml")
        sizes = {size: int(number) for size, number in (each.split("=") for each in layout)}
        before = described(ready(edited(tmp_path, file=file)))
        changes = [("layout", sizes)] if sizes else []
        after = described(ready(edited(tmp_path, *changes, file=file), *words.split()))
        return "\n".join(line for line in difflib.ndiff(before, after) if line[0] in "+-")

    golden.check_session(GOLDEN / "words.txt", answer)


def test_run_directory_explains_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEXT", "/data/text")
    changes = (
        ("environment", "LEVEL", "a${TEXT}"),
        ("megatron", "data-path", "${TEXT}-${LEVEL}$"),
        ("setup", ["source ${HOME}/env"]),
    )
    run = ready(edited(tmp_path, *changes), "--lr", "1e-3")
    assert run.arguments["data-path"] == "/data/text-a/data/text$"
    assert run.arguments["save"] == f"{run.directory}/checkpoints"
    start.write(run)
    assert run.directory == Path("runs/quickstart_launch").absolute()
    assert {path.name for path in run.directory.iterdir()} == {
        *("config.yaml", "cluster.yaml", "plan.json", "versions.json"),
        *("run.sh", "start.sh", "logs"),
    }
    # It holds the environment.
    assert run.directory.stat().st_mode & 0o777 == 0o700
    assert "\nsource ${HOME}/env\n" in (run.directory / "run.sh").read_text()
    # The configuration is a run file that says the same; it reads nothing but what stands beside
    # it, and so does the run.
    again = prepare(str(run.directory / "config.yaml"), [], tmp_path / "again", dry_run=True)
    cluster = run.directory / "cluster.yaml"
    assert cluster.read_bytes() == (CONFIGS / "clusters/emulated_2x4_500mbit.yaml").read_bytes()
    assert str(cluster) in [word for words in run.words for word in words]
    assert (again.config.model, again.config.cluster) == (None, str(cluster))
    assert again.arguments == {**run.arguments, "moe-monta-cluster": str(cluster)}
    assert again.config.layout == run.config.layout and document_of(again) == document_of(run)
    plan = json.loads((run.directory / "plan.json").read_text())
    assert (plan["chain"], plan["num_chunks"]) == ("alltoall_allgather", 4)
    versions = json.loads((run.directory / "versions.json").read_text())["versions"]
    assert versions["monta-megatron"]
    # Nothing is overwritten.
    assert ready(QUICKSTART).directory.name == "quickstart_launch-2"


def test_a_config_of_hugging_face(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["mixtral_8x7b"]))
    run = ready(edited(tmp_path, ("model", "."), file=MIXTRAL))
    assert document_of(run) == document_of(ready(MIXTRAL))
    # Megatron's arguments say how long sequences are.
    (note,) = [note for note in run.notes if "assumed" in note]
    assert note.endswith("bf16 True, moe-router-dtype fp32")


@pytest.mark.parametrize(
    ("file", "words"),
    # A job that would start over is not requeued.
    [(MIXTRAL, ["--moe-layer-freq", "([1]*32)"]), (QUICKSTART, ["--load", "false"])],
)
def test_run_script(file: str, words: list[str]) -> None:
    text = "\n".join([*described(ready(file, *words)), ""])
    golden.check(GOLDEN / f"run_{Path(file).stem}.txt", text)


def test_a_job_that_is_not_requeued_is_said(monta: Monta) -> None:
    words = ["--dry-run", "--start", "sbatch", "--json", "--", "--load", "false"]
    _, document, said = monta("launch", MIXTRAL, *words)
    (note,) = (note for note in json.loads(document)["notes"] if "not requeued" in note)
    assert note.endswith("without --load") and f"note: {note}" in said


def test_a_job_that_its_file_does_not_requeue(tmp_path: Path) -> None:
    file = edited(tmp_path, ("slurm", "options", "requeue", False), file=MIXTRAL)
    text = run_script(ready(file))
    assert "#SBATCH --no-requeue\n" in text and "--signal" not in text


def test_start_by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = ready(QUICKSTART), ready(MIXTRAL)
    assert choose_start(None, one, dry_run=True) == "torchrun"
    assert choose_start(None, two, dry_run=True) == "sbatch"
    assert start_command("none", two) == []
    with pytest.raises(ValueError, match="--start: got torchrun"):
        choose_start("torchrun", two, dry_run=True)
    monkeypatch.setattr(start.shutil, "which", lambda name: name)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match="srun needs a job around it: `salloc --nodes 2"):
        choose_start("srun", two, dry_run=False)


def test_without_a_parser_a_note_says_so(tmp_path: Path) -> None:
    """A Megatron beside the script is the run's; before 0.19 it may have no training."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for folder in (core.parent, core):
        (folder / "__init__.py").touch()
    (core / "package_info.py").write_text("__version__ = '0.16.1'")
    (tmp_path / "train.py").touch()
    run = checked(prepare(edited(tmp_path, ("script", "train.py")), [], None, dry_run=False))
    (note,) = (note for note in run.notes if "not checked" in note)
    assert "Megatron-Core 0.16.1 has no megatron.training" in note
    assert run.megatron is None


def test_bad_run_files(tmp_path: Path, monta: Monta) -> None:
    """Keys with values that they have instead; others are in unit/mistakes."""

    def answer(change: str) -> str:
        keys, _, value = change.partition(": ")
        file = edited(tmp_path, (*keys.split("."), yaml.safe_load(value)))
        return monta.refusal("launch", file).replace(f"{tmp_path}/", "")

    golden.check_cases(GOLDEN / "bad_run_files.txt", answer)
    assert not Path("runs").exists()
