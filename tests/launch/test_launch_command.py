"""`monta launch` before anything starts: what wins over what, what it writes, and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from published_configs import CONFIGS as PUBLISHED

from monta_megatron.cli import main
from monta_megatron.common import strict_yaml
from monta_megatron.tools.launch import start
from monta_megatron.tools.launch.arguments import from_words
from monta_megatron.tools.launch.log import summary_of
from monta_megatron.tools.launch.prepare import Run, checked, prepare
from monta_megatron.tools.launch.run_config import RunConfig
from monta_megatron.tools.launch.start import choose_start, run_script, start_command, submit

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = str(CONFIGS / "runs" / "quickstart.yaml")
MIXTRAL = str(CONFIGS / "runs" / "mixtral_8x7b.yaml")
STOCK = ["--moe-token-dispatcher-type", "alltoall"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MEGATRON_LM_DIR", raising=False)


def ready(file: str, *words: str) -> Run:
    return prepare(file, words, None, dry_run=True)


def words_of(run: Run) -> list[str]:
    return [word for argument in run.arguments.values() for word in argument.words]


# What wins over what


def test_defaults_under_the_file_under_the_command_line() -> None:
    run = ready(MIXTRAL)
    assert run.arguments["lr"].words == ["--lr", "0.0001"]
    assert run.arguments["moe-token-dispatcher-type"].value == "monta"
    assert run.arguments["moe-monta-cluster"].value == str(CONFIGS / "clusters/h100_8x_ndr.yaml")
    run = ready(MIXTRAL, "--lr", "3e-4", "--log_throughput", "false", "--mtp-num-layers=1")
    assert run.arguments["lr"].words == ["--lr", "3e-4"]
    assert "log-throughput" not in run.arguments
    assert run.arguments["mtp-num-layers"].words == ["--mtp-num-layers", "1"]
    assert len(words_of(run)) == len(words_of(ready(MIXTRAL))) + 1


def test_a_parallel_size_on_the_command_line_changes_the_layout() -> None:
    run = ready(MIXTRAL, "--pipeline-model-parallel-size", "1", "--expert-tensor-parallel-size=2")
    assert (run.config.layout.pp, run.config.layout.etp) == (1, 2)
    assert run.arguments["expert-tensor-parallel-size"].words[1] == "2"
    assert run.plan is not None and run.plan.shape.layout.etp == 2
    assert run.plan.shape.layout.nodes[-1] == 1


def test_longer_sequences_and_larger_batches_are_planned_for() -> None:
    for size, tokens in (("1", 8192), ("2", 16384)):
        batch = ["--seq-length", "8192", "--micro-batch-size", size]
        run = ready(MIXTRAL, *batch, "--num-layers", "4")
        assert run.plan is not None and run.plan.shape.tokens_per_rank == tokens


def test_planned_for_the_slowest_exchange(tmp_path: Path) -> None:
    """EP 2 on nodes of 3: of ranks 0-1, 2-3 and 4-5 only those in the middle lie on two nodes."""
    layout = {"nodes": 2, "ranks_per_node": 3, "ep": 2}
    changes = (
        ("layout", layout),
        ("megatron", "moe-monta-ranks-per-node", 3),
        ("megatron", "global-batch-size", 24),
    )
    run = ready(edited(tmp_path, *changes))
    assert run.plan is not None and run.plan.shape.layout.nodes == (0, 1)


def test_planned_for_the_cluster_that_the_dispatcher_is_given(tmp_path: Path) -> None:
    other = CONFIGS / "clusters" / "emulated_2x4_500mbit.yaml"
    with pytest.raises(ValueError, match=r"must be at most 4, the ranks of a node of"):
        ready(MIXTRAL, "--moe-monta-cluster", str(other))
    rack = str(CONFIGS / "clusters" / "gb200_nvl72.yaml")
    run = ready(MIXTRAL, "--moe-monta-cluster", rack)
    assert run.plan is not None and run.plan.cluster == "GB200 NVL72, 8 of 72 ranks per node"
    # Its hosts have 4 ranks, and share the link of their rack.
    layout = {"nodes": 4, "ranks_per_node": 4, "ep": 8}
    file = edited(
        tmp_path,
        ("layout", layout),
        ("megatron", "global-batch-size", 64),
        ("megatron", "moe-monta-ranks-per-node", None),
    )
    run = ready(file, "--moe-monta-cluster", rack)
    assert run.plan is not None and run.plan.cluster == "GB200 NVL72"
    assert any("72 ranks are taken to share a node link" in note for note in run.notes)


def test_a_run_that_does_not_fit_is_said() -> None:
    """The file has PP 2 and EP 8."""
    sizes = ("--pipeline-model-parallel-size", "1", "--expert-model-parallel-size", "4")
    fitting, run = ready(MIXTRAL), ready(MIXTRAL, *sizes)
    assert fitting.memory is not None and fitting.memory.fits
    assert run.memory is not None and not run.memory.fits


def test_stock_dispatcher_from_the_same_file() -> None:
    run = ready(QUICKSTART, *STOCK)
    assert not any("monta" in word for word in run.arguments)
    assert run.plan is run.memory is None
    assert any("moe-monta-chain" in note and "left out" in note for note in run.notes)


def test_the_script_s_own_arguments_can_be_overridden_too() -> None:
    run = ready(QUICKSTART, "--record", "elsewhere.jsonl")
    assert run.script_arguments["record"].words == ["--record", "elsewhere.jsonl"]
    assert "record" not in run.arguments


def test_own_data_in_the_place_of_random_tokens() -> None:
    run = ready(MIXTRAL, "--mock-data", "false", "--data-path", "/data/text")
    assert "mock-data" not in run.arguments
    assert run.config.megatron["mock-data"] is False
    assert run.arguments["data-path"].value == "/data/text"


def test_words_of_a_command_line() -> None:
    arguments = from_words(["--a", "-1", "2", "--b", "--c=x=y", "--d", "false"])
    assert {name: argument.value for name, argument in arguments.items()} == {
        "a": ["-1", "2"],
        "b": True,
        "c": "x=y",
        "d": False,
    }


# What is written


def test_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEXT", "/data/text")
    path = edited(
        tmp_path, ("environment", "LEVEL", "a"), ("megatron", "data-path", "${TEXT}-${LEVEL}$$")
    )
    run = ready(path)
    assert run.arguments["data-path"].value == "/data/text-a$"
    assert run.arguments["save"].value == f"{run.directory}/checkpoints"


def test_run_directory_explains_itself(tmp_path: Path) -> None:
    run = ready(edited(tmp_path, ("megatron", "wandb-exp-name", "$$5")), "--lr", "1e-3")
    assert run.arguments["wandb-exp-name"].value == "$5"
    run = start.self_contained(run)
    start.write(run)
    assert run.directory == Path("runs/quickstart_launch").absolute()
    assert {path.name for path in run.directory.iterdir()} == {
        *("config.yaml", "model.yaml", "cluster.yaml", "plan.json", "versions.json"),
        *("run.sh", "start.sh", "logs"),
    }
    # It holds the environment.
    assert run.directory.stat().st_mode & 0o777 == 0o700
    # The configuration is a run file that says the same; only the directory is another.
    again = prepare(str(run.directory / "config.yaml"), [], tmp_path / "again", dry_run=True)
    # It reads nothing but what stands beside it, and so does the run.
    cluster = run.directory / "cluster.yaml"
    assert cluster.read_bytes() == (CONFIGS / "clusters/emulated_2x4_500mbit.yaml").read_bytes()
    assert run.arguments["moe-monta-cluster"].value == str(cluster)
    assert (again.config.model, again.config.cluster) == (
        *(str(run.directory / "model.yaml"), str(cluster)),
    )
    assert words_of(again) == words_of(run)
    assert again.config.layout == run.config.layout
    plan = json.loads((run.directory / "plan.json").read_text())
    assert (plan["chain"], plan["num_chunks"]) == ("alltoall_allgather", 4)
    versions = json.loads((run.directory / "versions.json").read_text())
    assert versions["versions"]["monta-megatron"] and versions["arguments_checked"] is False


def test_a_config_of_hugging_face_is_copied_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["mixtral_8x7b"]))
    file = tmp_path / "run.yaml"
    file.write_text(
        Path(MIXTRAL)
        .read_text()
        .replace("../models/mixtral_8x7b.yaml", ".")
        .replace("../clusters/h100_8x_ndr.yaml", "h100_8x_ndr")
    )
    run = ready(str(file))
    assert run.plan == ready(MIXTRAL).plan
    # Megatron's arguments say how long sequences are.
    (note,) = [note for note in run.notes if "assumed" in note]
    assert note.endswith("bf16 True, moe-router-dtype fp32")
    run = start.self_contained(run)
    start.write(run)
    copy = run.directory / "model.json"
    assert json.loads(copy.read_text()) == PUBLISHED["mixtral_8x7b"]
    again = ready(str(run.directory / "config.yaml"))
    assert again.config.model == str(copy) and again.plan == run.plan


def test_the_benefit_is_of_one_stage_and_all_micro_batches() -> None:
    run = ready(str(CONFIGS / "runs" / "qwen3_235b_a22b.yaml"))
    assert run.benefit is not None and run.plan is not None
    # 94 layers in 8 stages; 2,048 sequences of 16 data parallel ranks.
    assert (run.benefit.num_moe_layers, run.benefit.num_micro_batches) == (12, 128)
    assert run.benefit.ratio > 1.3 and run.benefit.chosen_us == run.plan.predicted_us
    # A chain that is named may be slower than stock, which is said.
    named = ready(QUICKSTART).benefit
    assert named is not None and " loses " in named.text
    assert ready(QUICKSTART, *STOCK).benefit is None


def test_the_summary_is_what_the_log_says() -> None:
    run = ready(QUICKSTART)
    start.write(run)
    log = run.directory / "logs" / "run.log"
    line = " iteration {}/ 9 | elapsed time per iteration (ms): {} | lm loss: {} | x: 1 |"
    iterations = ((1, "900.5", "5.5E+00"), (2, "100.0", "4.25E+00"), (3, "104.0", "nan"))
    said = "monta: alltoall_allgather in 4 chunks, EP 2 x ETP 2 over 2 nodes: as asked for"
    log.write_text("\n".join([said, *(line.format(*each) for each in iterations)]))
    document = json.loads(json.dumps(summary_of(run).document(), allow_nan=False))
    assert (document["first_loss"], document["last_loss"]) == (5.5, "nan")
    assert (document["iterations"], document["ms_per_iteration"]) == (3, 102.0)
    assert document["planned_inter_bytes"] == 1_081_344
    # The plan is that of another chain.
    log.write_text("monta: alltoall in 1 chunk, EP 2 x ETP 2 over 2 nodes: as asked for\n")
    assert summary_of(run).planned_inter_bytes is summary_of(run).benefit is None


def test_nothing_is_overwritten() -> None:
    for name in ("quickstart_launch", "quickstart_launch-2", "quickstart_launch-3"):
        run = ready(QUICKSTART)
        assert run.directory.name == name
        start.write(run)


def test_run_script_serves_bash_and_sbatch() -> None:
    lines = run_script(ready(MIXTRAL, "--moe-layer-freq", "([1]*32)")).splitlines()
    assert "#SBATCH --nodes=2" in lines
    assert "#SBATCH --ntasks-per-node=1" in lines
    assert "#SBATCH --gpus-per-node=8" in lines
    assert "#SBATCH --time=240" in lines
    assert "#SBATCH --signal=B:USR1@300" in lines
    assert "#SBATCH --requeue" in lines
    assert "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in lines
    assert "    --moe-layer-freq '([1]*32)'" in lines
    assert lines[-2].endswith('start.sh" --ranks-per-node 8 --nodes 2 -- \\')


def test_a_job_that_would_start_over_is_not_requeued(capsys: pytest.CaptureFixture[str]) -> None:
    run = ready(MIXTRAL, "--load", "false")
    assert run.lacks_to_resume == ("load",)
    script = run_script(run)
    assert "#SBATCH --no-requeue" in script
    assert "--signal" not in script
    words = ["--dry-run", "--start", "sbatch", "--json", "--", "--load", "false"]
    assert main(["launch", "--config", MIXTRAL, *words]) == 0
    said = capsys.readouterr()
    (note,) = (note for note in json.loads(said.out)["notes"] if "not requeued" in note)
    assert note.endswith("without --load")
    assert f"note: {note}" in said.err


def test_start_by_nodes() -> None:
    one, two = ready(QUICKSTART), ready(MIXTRAL)
    assert choose_start(None, one, dry_run=True) == "torchrun"
    assert choose_start(None, two, dry_run=True) == "sbatch"
    assert start_command("srun", two)[:3] == ["srun", "--kill-on-bad-exit=1", "--cpu-bind=none"]
    assert "--export=ALL" in start_command("srun", two)
    assert "--exclusive" in start_command("srun", two)
    assert start_command("none", two) == []
    with pytest.raises(ValueError, match="--start: got torchrun"):
        choose_start("torchrun", two, dry_run=True)


def test_a_job_that_slurm_refuses_is_an_error_in_its_words() -> None:
    assert submit(["bash", "-c", "echo 17"]) == "17"
    rejects = "echo 'sbatch: error: invalid partition' >&2; echo second line >&2; exit 1"
    with pytest.raises(ValueError, match=r"^sbatch: sbatch: error: invalid partition second line$"):
        submit(["bash", "-c", rejects])


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


# Bad input


def edited(folder: Path, *changes: tuple[str, str, Any] | tuple[str, Any]) -> str:
    """The quickstart's file with values changed; None leaves a key out."""
    data = yaml.safe_load(Path(QUICKSTART).read_text())
    for name in ("script", "model", "cluster"):
        data[name] = str((CONFIGS / "runs" / data[name]).resolve())
    for *keys, value in changes:
        inner = data
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
        if value is None:
            del inner[keys[-1]]
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


BAD: dict[str, tuple[list[Any], list[str], list[str]]] = {
    # name: (changes of the file, words after --, what the one line says)
    "unknown key": ([("megatorn", {})], [], ["megatorn", "did you mean megatron?"]),
    "no layout": ([("layout", None)], [], ["layout: missing"]),
    "too few ranks": (
        [("layout", "tp", 8)],
        [],
        ["layout.nodes * ranks_per_node: got 4", "multiple of tp * cp * pp (8)"],
    ),
    "twice": ([("megatron", "train_iters", 2)], [], ["megatron.train_iters", "train-iters too"]),
    "contradiction": (
        [("megatron", "tensor-model-parallel-size", 4)],
        [],
        ["megatron.tensor-model-parallel-size: got 4", "must be 2", "layout.tp", "left out"],
    ),
    "experts": (
        [("layout", {"nodes": 1, "ranks_per_node": 3, "ep": 3})],
        [],
        ["layout.ep: got 3, must divide num-experts of quickstart (8)"],
    ),
    "more than the cluster": (
        [("layout", {"nodes": 4, "ranks_per_node": 4})],
        [],
        ["layout.nodes * ranks_per_node: got 16", "at most the 8 ranks"],
    ),
    "no script": ([("script", "none.py")], [], ["script: got", "none.py", "exists"]),
    "no script named": ([("script", None)], [], ["script: missing", "MEGATRON_LM_DIR"]),
    "variable": ([("megatron", "save", "${NONE}/x")], [], ["megatron.save", "NONE must be set"]),
    "reserved": ([("slurm", "options", {"nodes": 2})], [], ["slurm.options.nodes", "left out"]),
    "a batch that DP does not divide": (
        [("megatron", "global-batch-size", 15)],
        [],
        ["run.yaml: megatron.global-batch-size: got 15, must be a multiple of", "the next is 16"],
    ),
    "signal at once": (
        [("slurm", "time_limit_minutes", 5)],
        [],
        ["slurm.signal_before_seconds", "300", "time_limit_minutes"],
    ),
    "no dashes": ([], ["lr", "1e-4"], ["got 'lr'", "--"]),
    "false for nothing": ([], ["--use-tp-pp-dp-mapping", "false"], ["got false", "run.yaml"]),
    "nearly a chain": ([], ["--moe-monta-chain", "alltoal"], ["(did you mean alltoall?)"]),
    "chunks of a serial chain": (
        [],
        ["--moe-monta-chain", "alltoall", "--moe-monta-num-chunks", "3"],
        ["--moe-monta-num-chunks: got 3, must be 1 for the serial chain alltoall"],
    ),
}


def test_texts_stay_as_they_are_written(tmp_path: Path) -> None:
    """Each would be a number to YAML 1.1: 630, 14400, 8."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: a\nlayout: {nodes: 1, ranks_per_node: 1}\nmegatron: {}\n"
        "environment: {A: 10:30, B: 4:00:00, C: 010}\n"
    )
    config = strict_yaml.load(RunConfig, path)
    assert config.environment == {"A": "10:30", "B": "4:00:00", "C": "010"}
    path.write_text(strict_yaml.dump(config))
    assert strict_yaml.load(RunConfig, path) == config


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, words, said = BAD[name]
    path = edited(tmp_path, *changes)
    assert main(["launch", "--config", path, "--", *words]) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and captured.out == ""
    for part in said:
        assert part in lines[0]
    assert not Path("runs").exists()


def test_a_directory_with_something_in_it_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    command = ["launch", "--config", QUICKSTART, "--run-directory", str(tmp_path)]
    assert main(command) == 2
    assert "--run-directory" in capsys.readouterr().err
