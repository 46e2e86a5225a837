"""`monta plan --log`: logs of every kind are read, and the share of the exchange is said."""

from pathlib import Path

import pytest
from clusters import by_hand
from commands import Monta
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training_logs import QWEN3_30B, TRAINING, arguments_block, iteration_lines, training_log

from monta_megatron.planner.model import model_of
from monta_megatron.tools.plan.request import PlanRequest
from monta_megatron.tools.training_log import TrainingLog, read_log

ON_16 = {**QWEN3_30B, "world_size": 16, "expert_model_parallel_size": 16}
CLUSTER = ["--cluster", "h100_8x_ndr"]


def write(folder: Path, *lines: str) -> Path:
    path = folder / "train.log"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def read(folder: Path, *lines: str) -> TrainingLog:
    return read_log(write(folder, *lines))


@pytest.mark.parametrize("ran", ["alltoall", "allgather"])
def test_the_plan_of_a_log_is_that_of_its_model(tmp_path: Path, monta: Monta, ran: str) -> None:
    path = write(tmp_path, training_log({**ON_16, "moe_token_dispatcher_type": ran}, 9000.0))
    of_log = monta.document("plan", "--log", path, *CLUSTER)
    words = ["plan", "--model", "qwen3_30b_a3b", *CLUSTER, "--world-size", "16", "--ep", "16"]
    of_preset = monta.document(*words, "--global-batch-size", "256")
    for name in of_preset.keys() - {"notes", "model"}:
        assert of_log[name] == of_preset[name], name
    # 48 layers, and 16 micro-batches of each of 16 data parallel ranks.
    ran_us = of_log["stock_times_us"][ran]
    saved_us = ran_us - of_log["predicted_us"]
    for name, us in (("exchange_share", ran_us), ("saved_share", saved_us)):
        assert of_log[name] == pytest.approx(us * 48 * 16 / 1e3 / 9000)


LABELS = by_hand("labels")


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
def test_labels_in_front_of_lines(tmp_path: Path, label: str) -> None:
    lines = training_log(ON_16, 9000.0).splitlines()
    assert read(tmp_path, *map(label.format, lines)) == read(tmp_path, *lines)


def test_a_log_without_arguments(tmp_path: Path, monta: Monta) -> None:
    path = write(tmp_path, *iteration_lines([9.0] * 3))
    assert f"{path}: holds no arguments of the training" in monta.refusal(
        "plan", "--log", path, *CLUSTER
    )


def test_a_log_without_a_world_size(tmp_path: Path, monta: Monta) -> None:
    settings = {**TRAINING, **QWEN3_30B, "expert_model_parallel_size": 4}
    path = write(tmp_path, *arguments_block(settings), *iteration_lines([9.0] * 3))
    words = ["plan", "--log", path, *CLUSTER]
    assert "--world-size: not given" in monta.refusal(*words)
    assert monta(*words, "--world-size", "8")[0] == 0


# As Megatron Bridge prints them: its whole configuration, and what differs from defaults.
BRIDGE, SUMMARY = (
    Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("bridge_config.yaml", "bridge_summary.txt")
)


@pytest.mark.parametrize("label", ["", "[default0]:", "0: "])
@pytest.mark.parametrize("printed", [BRIDGE, SUMMARY, BRIDGE + SUMMARY])
def test_configurations_of_bridge(tmp_path: Path, monta: Monta, label: str, printed: str) -> None:
    """Keys of the model and the training alone, lists, and values beside their defaults."""
    # The first two, in which everything starts, do not count.
    lines = [*printed.splitlines(), *iteration_lines([9.0, 9.0, 3.0, 4.0, 5.0])]
    path = write(tmp_path, *(f"{label}{line}" for line in lines))
    log = read_log(path)
    model = model_of(log.arguments, "a", "b")
    assert model.moe_layers == (False, True, True)
    assert (model.row_size, model.value_bytes, model.micro_batch_size) == (64, 2, 1)
    for name in ("swiglu", "group-query-attention", "untie-embeddings-and-output-weights"):
        assert log.arguments[name] is True
    for name in ("decoder-first-pipeline-num-layers", "num-query-groups"):
        assert log.arguments[name] == "2"
    request = log.request(PlanRequest(model="", cluster="", world_size=16), "a log")
    assert (request.tp, request.ep, request.global_batch_size) == (1, 16, 64)
    assert log.iteration_ms() == 4.0
    _, planned, _ = monta("plan", "--log", path, *CLUSTER, "--world-size", "16")
    assert "4 ms by flex, whose exchange has no price" in " ".join(planned.split())


def test_restarts_and_cut_lines(tmp_path: Path) -> None:
    """Two starts, of which the last one counts; its last line is cut."""
    first = [*arguments_block({**TRAINING, **ON_16}), *iteration_lines([9.0] * 8)]
    changed = {**TRAINING, **ON_16, "micro_batch_size": 2}
    second = [*arguments_block(changed), *iteration_lines([7.0] * 6, first=5)]
    log = read(tmp_path, *first, *second, second[-1][:60])
    assert log.times_ms == dict.fromkeys(range(5, 11), 7.0)
    assert log.arguments["micro-batch-size"] == "2"


# A line, and what stands in place of some of its characters.
PLACES, NOISE = st.integers(0, 200), ["", "x", "-", "0", "\0", "\x1b[", "é", " iteration 3/ 4 |"]
DAMAGES = st.tuples(PLACES, PLACES, st.sampled_from([*NOISE, "." * 5000]), PLACES)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(DAMAGES, min_size=1, max_size=12))
def test_damaged_logs_give_one_line_or_a_plan(
    tmp_path: Path, monta: Monta, damages: list[tuple[int, int, str, int]]
) -> None:
    lines = training_log(ON_16, 9000.0).splitlines()
    for number, first, noise, end in damages:
        line = lines[number % len(lines)]
        lines[number % len(lines)] = line[:first] + noise + line[end:]
    status, printed, error = monta("plan", "--log", write(tmp_path, *lines), *CLUSTER)
    assert status == 0 or (status, printed, error.count("\n")) == (2, "", 1)
