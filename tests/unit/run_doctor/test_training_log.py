"""`monta doctor --log`: logs of every kind are read, and what published runs changed is named."""

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from training_logs import (
    PUBLISHED,
    QWEN3_30B,
    TRAINING,
    arguments_block,
    iteration_lines,
    published_log,
    training_log,
)
from watched_iteration import WATCHED

from monta_megatron.cli import main
from monta_megatron.tools.run_doctor.iteration import IterationReport, explain
from monta_megatron.tools.run_doctor.report import examine_run
from monta_megatron.tools.run_doctor.training_log import TrainingRecord, read_training_log

ON_16 = {**QWEN3_30B, "world_size": 16, "expert_model_parallel_size": 16}


def write(folder: Path, text: str) -> Path:
    path = folder / "train.log"
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str) -> TrainingRecord:
    return read_training_log(write(folder, text))


def report(folder: Path, text: str, cluster: str | None = None) -> IterationReport:
    return explain(read(folder, text), cluster)


# The faster run of a published pair: its ms of an iteration, and what it changed. Full recompute is
# predicted to take 13% too long in H2 (`benchmarks/validate.py`): it saves 1.57 times as much.
FASTER = [
    ("A2", 8600, "a larger micro-batch", 1.5),
    ("A1", 6870, "1F1B overlap of the exchange", 1.5),
    ("F4", 31310, "1F1B overlap of the exchange", 1.5),
    ("H2", 2589 * 184.2 / 225.1, "no full recompute", 1.6),
]


@pytest.mark.parametrize(("row", "faster_ms", "change", "most"), FASTER)
def test_what_a_faster_published_run_changed_is_named(
    tmp_path: Path, row: str, faster_ms: float, change: str, most: float
) -> None:
    cluster = "h100_efa_p5" if row.startswith("A") else "h100_8x_ndr"
    told = report(tmp_path, published_log(row), cluster)
    saved = {each.name: each.saved for each in told.changes}
    published = 1 - faster_ms / PUBLISHED[row][1]
    assert 0.6 <= saved[change] / published <= most
    assert told.monta_saved is not None
    assert len(told.changes) <= 3 and len(told.causes) <= 3


def test_nothing_that_the_run_has_is_recommended(tmp_path: Path) -> None:
    has = {
        **ON_16,
        "overlap_moe_expert_parallel_comm": True,
        "cuda_graph_impl": "transformer_engine",
        "moe_token_dispatcher_type": "monta",
        "global_batch_size": 16,
    }
    told = report(tmp_path, training_log(has, 1000.0), "h100_8x_ndr")
    assert [change.name for change in told.changes] == []
    assert told.monta_saved is None


def test_the_cluster_is_guessed_and_said_so(tmp_path: Path) -> None:
    told = report(tmp_path, training_log(ON_16, 9000.0, "A100"))
    assert told.cluster.name.startswith("A100") and told.is_guessed
    assert "guessed from A100" in told.text(80)
    text = training_log(ON_16, 9000.0).replace("NVIDIA H100", "a GPU")
    with pytest.raises(ValueError, match=r"--cluster: not given, must be, as .* names no GPU"):
        report(tmp_path, text)


LABELS = {
    "slurm": lambda line: f"12: {line}",
    "rank": lambda line: f"[default0]:{line}",
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
    assert {key: each.value for key, each in labelled.arguments.items()} == {
        key: each.value for key, each in plain.arguments.items()
    }


def test_a_configuration_as_yaml_and_the_loop_of_nemo(tmp_path: Path) -> None:
    settings = {**TRAINING, **ON_16}
    settings["num_moe_experts"] = settings.pop("num_experts")
    for key in ("group_query_attention", "virtual_pipeline_model_parallel_size"):
        settings.pop(key, None)
    config = [f"    {name}: {'null' if v is None else v}" for name, v in settings.items()]
    steps = [
        f"Training epoch 0, iteration {n}/99 | lr: 1e-4 | global_step: {n} | reduced_train_loss: 9 "
        f"| train_step_timing in s: {9.0 + n % 2:.2f}"
        for n in range(20)
    ]
    record = read(tmp_path, "\n".join(["NVIDIA H100", "model:", *config, *steps]))
    assert record.iteration_ms == pytest.approx(9500, abs=501) and len(record.times_ms) == 20
    told = explain(record, None)
    assert told.settings.ep == 16 and told.settings.world_size == 16


def test_restarts_and_cut_lines(tmp_path: Path) -> None:
    """Two starts: the second goes on from iteration 5; the last line is cut."""
    first = [*arguments_block({**TRAINING, **ON_16}), *iteration_lines([9.0] * 8)]
    changed = {**TRAINING, **ON_16, "micro_batch_size": 2}
    second = [*arguments_block(changed), *iteration_lines([7.0] * 6, first=5)]
    record = read(tmp_path, "\n".join([*first, *second, second[-1][:60]]))
    assert list(record.times_ms) == list(range(1, 11))
    assert record.times_ms[4] == 9.0 and record.times_ms[5] == 7.0
    assert record.arguments["micro-batch-size"].value == "2"
    assert record.peak_memory_bytes is None


def test_what_is_not_modelled_is_named(tmp_path: Path) -> None:
    sparse = {**ON_16, "experimental_attention_variant": "dsa"}
    note = "not modelled: linear or sparse attention"
    assert note in report(tmp_path, training_log(sparse, 9000.0)).notes
    linear = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4}
    told = report(tmp_path, training_log({**ON_16, **linear}, 9000.0))
    assert note not in told.notes
    assert (
        told.predicted.total_ms < report(tmp_path, training_log(ON_16, 9000.0)).predicted.total_ms
    )


def test_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, training_log(ON_16, 9000.0))
    words = ["doctor", "--log", str(path), "--cluster", "h100_8x_ndr"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "not explained" in text and "--overlap-moe-expert-parallel-comm" in text
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    parts = document["parts_ms"]
    hidden = parts.pop("exchange, hidden")
    assert sum(parts.values()) == pytest.approx(document["measured_ms"]) and hidden >= 0
    assert main(["doctor", "--cluster", "h100_8x_ndr"]) == 2
    assert "--cluster: given, must come with --log" in capsys.readouterr().err


def damaged(number: int) -> str:
    """A log from which lines are missing, or in which characters are others."""
    draw = random.Random(number)
    lines = training_log(ON_16, 9000.0).splitlines()
    if number % 4 == 0:
        lines = [line for line in lines if draw.random() < 0.9]
    elif number % 4 == 1:
        lines = lines[: draw.randrange(len(lines))]
    elif number % 4 == 2:
        lines = lines[draw.randrange(len(lines)) :]
    else:
        lines = ["".join(draw.choice((c, c, c, "7", " ", "\x00")) for c in line) for line in lines]
    return "\n".join(lines)


@pytest.mark.parametrize("number", range(40))
def test_damaged_logs_get_one_line_or_a_report(
    tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, damaged(number))
    status = main(["doctor", "--log", str(path)])
    out, err = capsys.readouterr()
    assert status in (0, 2)
    if status == 2:
        assert err.count("\n") == 1 and str(path) in err and out == ""
    else:
        assert "changes that would save most" in out


def test_the_log_in_the_folder_of_a_run_is_explained_too(tmp_path: Path) -> None:
    """With the exchange as it was watched, and the causes that the watched figures give."""
    (tmp_path / "train.log").write_text(training_log(ON_16, 5_000.0), encoding="utf-8")
    watched = {**asdict(WATCHED), "iteration": 10, "change": None}
    (tmp_path / "exchange_rank_0.jsonl").write_text(json.dumps(watched) + "\n", encoding="utf-8")
    told = examine_run(tmp_path)
    assert told.iteration is not None
    exchange_ms = sum(WATCHED.exchange_ms.values())
    assert told.document()["iteration"]["watched_exchange_ms"] == exchange_ms
    text = told.text(80)
    assert "the exchange, as watched" in text and text.index("likely causes") < text.index(
        "exchange: hierarchical_alltoall"
    )
    (tmp_path / "train.log").write_text("\n".join(iteration_lines([900.0, 100.0])))
    told = examine_run(tmp_path)
    assert told.iteration is None and told.document()["iteration"] is None
    assert told.run.notes[-1] == (
        f"the iteration by part is not predicted: {tmp_path}: no log holds the arguments that a "
        "training prints"
    )


def test_precision_gradients_and_cpu_ranks(tmp_path: Path) -> None:
    def told(cluster: str | None = "h100_8x_ndr", gpu: str = "H100", **said: object) -> Any:
        return report(tmp_path, training_log({**ON_16, **said}, 9000.0, gpu), cluster)

    plain = told(params_dtype="torch.bfloat16").predicted.parts_ms
    fp32 = told(params_dtype="torch.float32").predicted.parts_ms
    # All of it but what starts a collective or a copy.
    assert 1.9 < fp32["exchange, exposed"] / plain["exchange, exposed"] <= 2

    # The backward pass hides 70% of the reduction by the assumptions, unless the log says no.
    exposed = told(overlap_grad_reduce=False)
    ratio = exposed.predicted.parts_ms["gradient reduction"] / plain["gradient reduction"]
    assert ratio == pytest.approx(1 / 0.3)
    assert "--overlap-grad-reduce" not in {change.flags for change in told().changes}

    # Chains that send tokens permute them with kernels of their own.
    ours = [
        told(moe_token_dispatcher_type="monta", moe_permute_fusion=fused).predicted.total_ms
        for fused in (True, False)
    ]
    assert ours[0] == ours[1]

    cpu = told(gpu="monta-megatron: CPU ranks stand in for CUDA and Gloo for NCCL")
    assert cpu.record.gpu == "CPU ranks"
    assert cpu.predicted.parts_ms["experts"] > 1000 * plain["experts"]
    with pytest.raises(ValueError, match="names no GPU"):
        told(None, "CPU ranks stand in for CUDA")
