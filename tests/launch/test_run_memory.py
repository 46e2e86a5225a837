"""`monta launch` and the memory of a rank: what Megatron's arguments keep there."""

import json
from pathlib import Path

import pytest

from monta_megatron.cli import main
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.training_memory import HeldState, state_bytes
from monta_megatron.tools.launch.arguments import from_words
from monta_megatron.tools.launch.planning import held_state
from monta_megatron.tools.launch.prepare import prepare
from monta_megatron.tools.launch.run_config import RunLayout

CONFIGS = Path(__file__).parents[2] / "configs"
MIXTRAL = str(CONFIGS / "runs" / "mixtral_8x7b.yaml")
# The file has PP 2 and EP 8.
ONE_STAGE = ("--pipeline-model-parallel-size", "1", "--expert-model-parallel-size", "4")
LAYOUT = RunLayout(nodes=2, ranks_per_node=8, tp=2, pp=4)


@pytest.mark.parametrize(
    ("words", "on_every_rank", "sharded"),
    [
        # Weights and gradients, then master weights and two moments; without a flag, in fp32.
        ("--use-distributed-optimizer", 4 + 4, 4 + 4),
        ("--bf16 --use-distributed-optimizer", 2 + 4, 4 + 4 + 4),
        ("--bf16", 2 + 4 + 4 + 4 + 4, 0),
        ("--fp16 --use-distributed-optimizer", 2 + 2, 12),
        ("--bf16 --use-distributed-optimizer --grad-reduce-in-bf16", 2 + 2, 12),
        ("--bf16 --use-distributed-optimizer --fp8-param-gather", 1 + 4, 12),
        (
            "--bf16 --use-distributed-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
            "--exp-avg-sq-dtype fp8 --main-params-dtype fp16",
            2 + 2,
            2 + 2 + 1,
        ),
        ("--bf16 --use-distributed-optimizer --optimizer-cpu-offload", 2 + 4, 0),
        (
            "--bf16 --use-distributed-optimizer --optimizer-cpu-offload "
            "--optimizer-offload-fraction 0.25",
            2 + 4,
            9,
        ),
        # Master weights alone, of an optimizer whose state is not known here.
        ("--bf16 --optimizer muon", 2 + 4, 4),
        ("--bf16 --use-megatron-fsdp", 0, 18),
    ],
)
def test_bytes_of_a_parameter(words: str, on_every_rank: float, sharded: float) -> None:
    held = held_state(from_words(words.split()), LAYOUT)
    assert (held.bytes_per_parameter, held.sharded_bytes_per_parameter) == (on_every_rank, sharded)


@pytest.mark.parametrize(
    ("words", "num_micro_batches", "layers_per_input"),
    [
        # Two data parallel ranks.
        ("--bf16", 1, 1),
        ("--global-batch-size 12 --micro-batch-size 2", 3, 1),
        ("--recompute-method uniform --recompute-num-layers 4", 1, 4),
        ("--recompute-method block --recompute-num-layers 4", 1, 1),
        ("--cpu-offloading-num-layers 2", 1, None),
    ],
)
def test_inputs_of_layers(words: str, num_micro_batches: int, layers_per_input: int | None) -> None:
    held: HeldState = held_state(from_words(words.split()), LAYOUT)
    assert (held.num_micro_batches, held.layers_per_input) == (num_micro_batches, layers_per_input)


def test_a_part_of_the_model_is_a_part_of_its_state() -> None:
    model = load_model(CONFIGS / "models" / "deepseek_v3.yaml")
    layout = LAYOUT.parallel
    whole = state_bytes(model, layout, held_state(from_words(["--bf16"]), LAYOUT))
    part = held_state(from_words(["--bf16", "--num-layers", "2"]), LAYOUT)
    assert state_bytes(model, layout, part) == pytest.approx(whole * 2 / 61)


def test_a_run_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGATRON_LM_DIR", raising=False)
    words = ["launch", "--config", MIXTRAL, "--dry-run", "--json"]
    assert main([*words, "--", *ONE_STAGE]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == "" and line.startswith(f"monta launch: {MIXTRAL}: layout: needs 1")
    assert "must be at most 80 GB, memory_gb_per_rank of H100" in line

    assert main([*words, "--ignore-memory", "--", *ONE_STAGE]) == 0
    said = capsys.readouterr()
    assert "ignored as asked" in said.err
    memory = json.loads(said.out)["memory"]
    assert memory["ignored"] and memory["needed_bytes"] > memory["available_bytes"] == 80e9
    assert list(tmp_path.iterdir()) == []


def test_without_a_plan_it_is_said_that_nothing_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MEGATRON_LM_DIR", raising=False)
    words = ["--moe-token-dispatcher-type", "alltoall"]
    run = prepare(MIXTRAL, words, None, dry_run=True)
    assert run.memory is None and any("memory not checked" in note for note in run.notes)
    quickstart = str(CONFIGS / "runs" / "quickstart.yaml")
    run = prepare(quickstart, [], None, dry_run=True)
    assert any("no check, as the cluster file" in note for note in run.notes)
