"""`monta plan --log`: logs of every kind are read, and the share of the exchange is said."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clusters import document
from training_logs import QWEN3_30B, TRAINING, arguments_block, iteration_lines, training_log

from monta_megatron.cli import main
from monta_megatron.planner.models.model import model_of
from monta_megatron.tools.plan.training_log import TrainingLog, read_training_log

ON_16 = {**QWEN3_30B, "world_size": 16, "expert_model_parallel_size": 16}
CLUSTER = ["--cluster", "h100_8x_ndr"]


def write(folder: Path, text: str) -> Path:
    path = folder / "train.log"
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str) -> TrainingLog:
    return read_training_log(write(folder, text))


def plan(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return document(capsys, "plan", "--log", str(path), *CLUSTER, *words)


def test_the_plan_of_a_log_is_that_of_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, training_log(ON_16, 9000.0))
    of_log = plan(path, capsys)
    words = ["plan", "--model", "qwen3_30b_a3b", *CLUSTER, "--world-size", "16", "--ep", "16"]
    of_preset = document(capsys, *words, "--global-batch-size", "256")
    for name in ("chain", "num_chunks", "predicted_us", "stock_us"):
        assert of_log[name] == of_preset[name]
    assert of_log["memory"]["state_bytes"] == of_preset["memory"]["state_bytes"]
    # 48 layers, and 16 micro-batches of each of 16 data parallel ranks.
    exchange_ms = of_log["stock_us"] * 48 * 16 / 1e3
    assert of_log["iteration_ms"] == 9000.0
    assert of_log["exchange_share"] == pytest.approx(exchange_ms / 9000)
    saved_ms = (of_log["stock_us"] - of_log["predicted_us"]) * 48 * 16 / 1e3
    assert of_log["saved_share"] == pytest.approx(saved_ms / 9000)


def test_an_iteration_that_was_measured_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_log = plan(write(tmp_path, training_log(ON_16, 9000.0)), capsys)
    words = ["plan", "--model", "qwen3_30b_a3b", *CLUSTER, "--world-size", "16", "--ep", "16"]
    given = ["--global-batch-size", "256", "--iteration-ms", "9000"]
    of_flag = document(capsys, *words, *given)
    for name in ("iteration_ms", "exchange_share", "saved_share"):
        assert of_flag[name] == of_log[name]


def test_what_a_run_with_monta_saves_is_a_part_of_the_iteration_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = {**ON_16, "moe_token_dispatcher_type": "monta"}
    planned = plan(write(tmp_path, training_log(ours, 9000.0)), capsys)
    saved_ms = (planned["stock_us"] - planned["predicted_us"]) * 48 * 16 / 1e3
    assert planned["saved_share"] == pytest.approx(saved_ms / (9000 + saved_ms))
    assert planned["exchange_share"] == pytest.approx(
        planned["predicted_us"] * 48 * 16 / 1e3 / 9000
    )


LABELS: dict[str, Callable[[str], str]] = {
    "srun": lambda line: f"12: {line}",
    "torchrun": lambda line: f"[default0]:{line}",
    "mpirun": lambda line: f"[1,0]<stdout>:{line}",
    "kubernetes": lambda line: f"2026-01-01T10:00:00.123456789Z stdout F {line}",
    "ray": lambda line: (
        f"\x1b[36m(MegatronActor pid=12, ip=10.0.0.1)\x1b[0m {line} [repeated 3x across cluster]"
    ),
    "clock": lambda line: f"2026-01-01 10:00:00,123 [rank0] {line}",
    "colours": lambda line: f"\x1b[32m{line}\x1b[0m",
    "windows": lambda line: f"{line}\r",
}


@pytest.mark.parametrize("label", LABELS)
def test_labels_in_front_of_lines(tmp_path: Path, label: str) -> None:
    plain = read(tmp_path, training_log(ON_16, 9000.0))
    lines = training_log(ON_16, 9000.0).splitlines()
    labelled = read(tmp_path, "\n".join(map(LABELS[label], lines)))
    assert labelled.times_ms == plain.times_ms
    assert labelled.arguments == plain.arguments


@pytest.mark.parametrize(
    ("said", "line", "world_size"),
    [
        ({"world_size": 16}, "", 16),
        ({}, "using world size: 32, data-parallel size: 4, context-parallel size: 1", 32),
        ({"data_parallel_size": 4, "tensor_model_parallel_size": 2}, "", 8),
        ({}, "", None),
    ],
)
def test_world_size(
    tmp_path: Path, said: dict[str, int], line: str, world_size: int | None
) -> None:
    settings = {**TRAINING, **QWEN3_30B, "expert_model_parallel_size": 4, **said}
    lines = [line, *arguments_block(settings), *iteration_lines([9.0] * 3)]
    log = read(tmp_path, "\n".join(lines))
    assert log.world_size == world_size
    words = ["plan", "--log", str(tmp_path / "train.log"), *CLUSTER]
    assert main(words) == (2 if world_size is None else 0)
    if world_size is None:
        assert main([*words, "--world-size", "8"]) == 0


def test_a_configuration_as_yaml(tmp_path: Path) -> None:
    """As Megatron Bridge prints it."""
    settings = {**TRAINING, **ON_16, "gated_linear_unit": True}
    settings["num_moe_experts"] = settings.pop("num_experts")
    for key in ("group_query_attention", "swiglu", "untie_embeddings_and_output_weights"):
        del settings[key]
    config = [f"    {name}: {'null' if v is None else v}" for name, v in settings.items()]
    log = read(tmp_path, "\n".join(["model:", *config, *iteration_lines([9.0, 3.0, 4.0, 5.0])]))
    plain = read(tmp_path, training_log(ON_16, 9000.0))
    for name in ("num-experts", "swiglu", "group-query-attention", "num-query-groups"):
        assert log.arguments[name] == plain.arguments[name]
    assert (log.world_size, log.sizes) == (plain.world_size, plain.sizes)
    # Without the first one, in which everything starts.
    assert log.iteration_ms == 4.0


# As Megatron Bridge prints them: its whole configuration, and what differs from defaults.
BRIDGE, SUMMARY = (
    Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("bridge_config.yaml", "bridge_summary.txt")
)


@pytest.mark.parametrize("label", ["", "[default0]:", "0: "])
@pytest.mark.parametrize("printed", [BRIDGE, SUMMARY, BRIDGE + SUMMARY])
def test_configurations_of_bridge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], label: str, printed: str
) -> None:
    """Keys of the model and the training alone, lists, and values beside their defaults."""
    lines = [*printed.splitlines(), *iteration_lines([9.0, 3.0, 4.0])]
    path = write(tmp_path, "\n".join(f"{label}{line}" for line in lines))
    log = read_training_log(path)
    model = model_of(log.arguments, "a", "b")
    assert model.moe_layers == (False, True, True)
    assert (model.hidden_size, model.value_bytes, model.micro_batch_size) == (64, 2, 1)
    assert log.arguments["untie-embeddings-and-output-weights"] is True
    assert log.arguments["decoder-first-pipeline-num-layers"] == "2"
    assert log.world_size == (16 if printed.startswith("data") else None)
    assert main(["plan", "--log", str(path), *CLUSTER, "--world-size", "16"]) == 0
    assert "4 ms by flex, whose exchange has no price" in " ".join(capsys.readouterr().out.split())


def test_restarts_and_cut_lines(tmp_path: Path) -> None:
    """Two starts, of which the last one counts; its last line is cut."""
    first = [*arguments_block({**TRAINING, **ON_16}), *iteration_lines([9.0] * 8)]
    changed = {**TRAINING, **ON_16, "micro_batch_size": 2}
    second = [*arguments_block(changed), *iteration_lines([7.0] * 6, first=5)]
    log = read(tmp_path, "\n".join([*first, *second, second[-1][:60]]))
    assert log.times_ms == (7.0,) * 6
    assert log.arguments["micro-batch-size"] == "2"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"\x1f\x8b\x08\x00rest", "is gzip; unpack it, must be the text that was printed"),
        (b'{"log":"iteration 1/ 2 |","stream":"stdout"}\n', "is JSON lines of docker"),
    ],
)
def test_no_log_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, line: str
) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(content)
    assert main(["plan", "--log", str(path), *CLUSTER]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"monta plan: --log: {path}: {line}") and "\n" not in error


@pytest.mark.parametrize("seed", range(30))
def test_damaged_logs_give_one_line_or_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    draw = random.Random(seed)
    lines = training_log(ON_16, 9000.0).splitlines()
    for _ in range(draw.randrange(1, 12)):
        place = draw.randrange(len(lines))
        match draw.randrange(4):
            case 0:
                del lines[place]
            case 1:
                lines[place] = lines[place][: draw.randrange(len(lines[place]) + 1)]
            case 2:
                lines[place] = lines[place].replace("1", draw.choice("-x0")).replace("2", "")
            case 3:
                lines[place] += draw.choice(["\0", "\x1b[", "é", " iteration 3/ 4 |", "." * 5000])
    path = write(tmp_path, "\n".join(lines))
    status = main(["plan", "--log", str(path), *CLUSTER])
    printed = capsys.readouterr()
    assert status in (0, 2)
    if status == 2:
        assert printed.out == "" and len(printed.err.strip().splitlines()) == 1
