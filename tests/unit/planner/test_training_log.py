"""`monta plan --log`: logs of every kind are read, and the share of the exchange is said."""

import random
from pathlib import Path

import pytest
from commands import Monta
from training_logs import QWEN3_30B, TRAINING, arguments_block, iteration_lines, training_log

from monta_megatron.planner.model import model_of
from monta_megatron.tools.plan.request import PlanRequest
from monta_megatron.tools.training_log import TrainingLog, read_log

ON_16 = {**QWEN3_30B, "world_size": 16, "expert_model_parallel_size": 16}
CLUSTER = ["--cluster", "h100_8x_ndr"]


def write(folder: Path, text: str) -> Path:
    path = folder / "train.log"
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str) -> TrainingLog:
    return read_log(write(folder, text))


def test_the_plan_of_a_log_is_that_of_its_model(tmp_path: Path, monta: Monta) -> None:
    path = write(tmp_path, training_log(ON_16, 9000.0))
    of_log = monta.document("plan", "--log", str(path), *CLUSTER)
    words = ["plan", "--model", "qwen3_30b_a3b", *CLUSTER, "--world-size", "16", "--ep", "16"]
    given = ["--global-batch-size", "256", "--iteration-ms", "9000"]
    of_preset = monta.document(*words, *given)
    for name in of_preset.keys() - {"notes"}:
        assert of_log[name] == of_preset[name], name
    # 48 layers, and 16 micro-batches of each of 16 data parallel ranks.
    exchange_ms = of_log["stock_us"] * 48 * 16 / 1e3
    assert of_log["exchange_share"] == pytest.approx(exchange_ms / 9000)


@pytest.mark.parametrize("said", [{}, {"moe_token_dispatcher_type": "monta"}])
def test_the_dispatcher_that_ran(tmp_path: Path, said: dict[str, str]) -> None:
    log = read(tmp_path, training_log({**ON_16, **said}, 9000.0))
    assert log.dispatcher == said.get("moe_token_dispatcher_type", "alltoall")
    # Without the first iterations.
    assert log.iteration_ms == pytest.approx(9000.0, rel=1e-3)


def test_nodes_are_those_of_the_run(tmp_path: Path, monta: Monta) -> None:
    """4 ranks share a node link: 16 ranks are 4 nodes."""
    path = write(tmp_path, training_log({**ON_16, "moe_monta_ranks_per_node": 4}, 9000.0))
    planned = monta.document("plan", "--log", str(path), *CLUSTER)
    assert planned["shape"]["layout"]["nodes"] == [rank // 4 for rank in range(16)]


LABELS = {
    "srun": "12: {}",
    "torchrun": "[default0]:{}",
    "mpirun": "[1,0]<stdout>:{}",
    "kubernetes": "2026-01-01T10:00:00.123456789Z stdout F {}",
    "ray": "\x1b[36m(MegatronActor pid=12, ip=10.0.0.1)\x1b[0m {} [repeated 3x across cluster]",
    "clock": "2026-01-01 10:00:00,123 [rank0] {}",
    "colours": "\x1b[32m{}\x1b[0m",
    "windows": "{}\r",
}


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
def test_labels_in_front_of_lines(tmp_path: Path, label: str) -> None:
    text = training_log(ON_16, 9000.0)
    plain, labelled = (
        read(tmp_path, each) for each in (text, "\n".join(map(label.format, text.splitlines())))
    )
    assert labelled.times_ms == plain.times_ms
    assert labelled.arguments == plain.arguments


def test_a_log_without_a_world_size(tmp_path: Path, monta: Monta) -> None:
    settings = {**TRAINING, **QWEN3_30B, "expert_model_parallel_size": 4}
    lines = [*arguments_block(settings), *iteration_lines([9.0] * 3)]
    words = ["plan", "--log", write(tmp_path, "\n".join(lines)), *CLUSTER]
    assert monta.refusal(*words)
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
    path = write(tmp_path, "\n".join(f"{label}{line}" for line in lines))
    log = read_log(path)
    model = model_of(log.arguments, "a", "b")
    assert model.moe_layers == (False, True, True)
    assert (model.row_size, model.value_bytes, model.micro_batch_size) == (64, 2, 1)
    for name in ("swiglu", "group-query-attention", "untie-embeddings-and-output-weights"):
        assert log.arguments[name] is True
    for name in ("decoder-first-pipeline-num-layers", "num-query-groups"):
        assert log.arguments[name] == "2"
    request = log.request(PlanRequest(model="", cluster="", world_size=16))
    assert (request.tp, request.ep, request.global_batch_size) == (1, 16, 64)
    assert log.iteration_ms == 4.0
    _, planned, _ = monta("plan", "--log", path, *CLUSTER, "--world-size", "16")
    assert "4 ms by flex, whose exchange has no price" in " ".join(planned.split())


def test_restarts_and_cut_lines(tmp_path: Path) -> None:
    """Two starts, of which the last one counts; its last line is cut."""
    first = [*arguments_block({**TRAINING, **ON_16}), *iteration_lines([9.0] * 8)]
    changed = {**TRAINING, **ON_16, "micro_batch_size": 2}
    second = [*arguments_block(changed), *iteration_lines([7.0] * 6, first=5)]
    log = read(tmp_path, "\n".join([*first, *second, second[-1][:60]]))
    assert log.times_ms == dict.fromkeys(range(5, 11), 7.0)
    assert log.arguments["micro-batch-size"] == "2"


def test_keys_of_other_sections_change_nothing(tmp_path: Path) -> None:
    """A key without a value is one of the model only there."""
    lines = [*BRIDGE.splitlines(), "checkpoint:", "  hidden_size:", *iteration_lines([9.0] * 3)]
    assert read(tmp_path, "\n".join(lines)).arguments["hidden-size"] == "64"


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08\x00rest", b'{"log":"iteration 1/ 2 |"}\n', b""])
def test_no_log_is_one_line(tmp_path: Path, monta: Monta, content: bytes) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(content)
    error = monta.refusal("plan", "--log", path, *CLUSTER)
    assert error.startswith(f"monta plan: {path}: holds no `iteration N/ M | ... elapsed")
    assert error.endswith(
        "must be the text, not packed, that Megatron-LM or Megatron Bridge printed"
    )


@pytest.mark.parametrize("seed", range(30))
def test_damaged_logs_give_one_line_or_a_plan(tmp_path: Path, monta: Monta, seed: int) -> None:
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
    status, printed, error = monta("plan", "--log", path, *CLUSTER)
    assert status == 0 or (status, printed, error.count("\n")) == (2, "", 1)
