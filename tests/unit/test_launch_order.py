"""NCCL's launch order: when the variable is set, what NCCL has read, and what the log says."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_python import run_python
from stream_recorder import DURATIONS, RecordedStream, Recorder, times_in_one_queue
from test_stream_safety import Layer
from torch.distributed import distributed_c10d

from monta_megatron.common import ranks
from monta_megatron.exchange import launch_order
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.executor import dispatch
from monta_megatron.integration import arguments

pytestmark = [pytest.mark.old_end, pytest.mark.timeout(60)]

VARIABLE = launch_order.VARIABLE
VERSIONS = "NCCL 2.27.5, CUDA 12.9"
OVERLAP = "overlap, and cannot wait for each other in a circle: NCCL_LAUNCH_ORDER_IMPLICIT is 1"
TURNS = "do not overlap but take turns, and hold up no others: NCCL_LAUNCH_ORDER_IMPLICIT is"
FOR_1F1B = f"{TURNS} not set, {VERSIONS}; overlap_moe_expert_parallel_comm with TP x CP > 1 needs"
TOO_LATE = f"{TURNS} not set, {VERSIONS}; set it to 1 where the job starts, as process groups were"
NOT_SEEN = f"{TURNS} 1, {VERSIONS}; set it where the job starts, as it was not seen to be 1 before"


def configure(**fields: Any) -> None:
    """Make a TransformerConfig, as far as the launch order is concerned."""
    config = SimpleNamespace(num_moe_experts=8, moe_token_dispatcher_type="monta", **fields)
    arguments._checking_monta(lambda _: None)(config)


def make_groups() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# What happens in a process, by the names that the cases use.
EVENTS = {
    "import": launch_order.observe,
    "model": configure,
    "model with 1F1B": lambda: configure(overlap_moe_expert_parallel_comm=True),
    "model with 1F1B, TP": lambda: configure(
        overlap_moe_expert_parallel_comm=True, tensor_model_parallel_size=2
    ),
    "model with 1F1B, CP": lambda: configure(
        overlap_moe_expert_parallel_comm=True, context_parallel_size=2
    ),
    "model with TP": lambda: configure(tensor_model_parallel_size=2),
    "groups": make_groups,
    "destroy": dist.destroy_process_group,
    "user sets 1": lambda: os.environ.update({VARIABLE: "1"}),
    "user sets 0": lambda: os.environ.update({VARIABLE: "0"}),
}
# Events, the variable in the end, and what the last line says.
CASES: list[tuple[str, str | None, str]] = [
    ("model; groups", "1", f"{OVERLAP}, set by monta, {VERSIONS}; each collective of this process"),
    ("model with TP; groups", "1", OVERLAP),
    ("model with 1F1B; groups", "1", OVERLAP),
    # NCCL reads the variable once.
    ("model; groups; destroy; groups; model", "1", f"{OVERLAP}, set by monta"),
    ("groups; destroy; model; groups; model", None, TOO_LATE),
    ("import; groups; destroy; model; groups", None, TOO_LATE),
    ("groups; model", None, TOO_LATE),
    ("groups; destroy; user sets 1; model; groups", "1", NOT_SEEN),
    ("import; groups; user sets 1; model", "1", NOT_SEEN),
    ("user sets 1; groups; model", "1", NOT_SEEN),
    # The user's value.
    ("user sets 1; import; groups; model", "1", f"{OVERLAP}, as given"),
    ("user sets 1; import; groups; destroy; groups; model", "1", f"{OVERLAP}, as given"),
    ("user sets 1; model; groups; user sets 0; model", "0", f"{TURNS} 0"),
    ("user sets 0; model; groups; model", "0", f"{TURNS} 0"),
    ("user sets 0; model; groups; destroy; user sets 1; model", "1", NOT_SEEN),
    ("model; user sets 0; model with 1F1B, TP; groups", "0", f"{TURNS} 0"),
    # Left alone, for all models of the process.
    ("model with 1F1B, TP; groups", None, FOR_1F1B),
    ("model with 1F1B, CP; groups; model", None, FOR_1F1B),
    ("model with 1F1B, TP; model; groups; model", None, FOR_1F1B),
    ("model; model with 1F1B, TP; groups; model", None, FOR_1F1B),
    ("user sets 0; model with 1F1B, TP; groups", "0", f"{TURNS} 0"),
    # Too late to leave it alone: what NCCL has read holds.
    ("model; groups; model with 1F1B, TP", "1", "holds up the other micro-batch of overlap_moe"),
    ("user sets 1; model with 1F1B, TP; groups", "1", "holds up the other micro-batch of overlap"),
]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which no group was made yet, on a GPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(launch_order, "versions", lambda: ((2, 27, 5), (12, 9)))
    monkeypatch.setattr(launch_order, "_process", launch_order._Process())
    monkeypatch.setattr(ranks, "_printed", set())
    monkeypatch.setattr(distributed_c10d, "_backend", None)
    # Noted by the first call, so that whatever a test sets goes.
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    launch_order.communicators_overlap.cache_clear()
    yield
    launch_order.communicators_overlap.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("events", "value", "says"), CASES)
def test_what_nccl_has_read_decides(events: str, value: str | None, says: str, capsys: Any) -> None:
    for event in events.split("; "):
        EVENTS[event]()
    assert os.environ.get(VARIABLE) == value
    assert launch_order.communicators_overlap() == (OVERLAP in says or "holds up" in says)
    assert says in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("nccl", "cuda", "reason"),
    [
        ((2, 25, 1), (12, 9), "NCCL 2.25.1 does not know it"),
        ((2, 27, 5), (12, 2), "CUDA 12.2 would run communicators one after the other"),
    ],
)
def test_versions_that_do_not_overlap(nccl: Any, cuda: Any, reason: str, capsys: Any) -> None:
    launch_order.versions = lambda: (nccl, cuda)  # type: ignore[assignment]
    configure()
    assert VARIABLE not in os.environ and f"{TURNS} not set, {reason}" in capsys.readouterr().out
    os.environ[VARIABLE] = "1"
    configure()
    assert not launch_order.communicators_overlap()
    assert f"{TURNS} 1, {reason}" in capsys.readouterr().out


def test_a_line_is_printed_once(capsys: Any) -> None:
    for _ in range(3):
        configure()
    make_groups()
    configure()
    assert capsys.readouterr().out.count("monta: collectives of different groups") == 1


# By hand: in four chunks the collectives of the rail run from 0 to 4, and that of the node of the
# last chunk from 4 to 4.3, if a chunk takes 0.3 times as long over the node link as over the
# network (`monta plan` for DeepSeek-V3 on h100_8x_ndr at EP 64: 0.35). In launch order a collective
# that is issued behind them starts at 4 of 4.3.
@pytest.mark.parametrize(
    ("event", "least", "most"), [("model", 0.92, 0.94), ("model with 1F1B, TP", 0.0, 0.1)]
)
def test_where_a_collective_behind_a_dispatch_starts(event: str, least: float, most: float) -> None:
    """A collective of tensor parallelism, of the other micro-batch and so of another stream."""
    EVENTS[event]()
    make_groups()
    is_order_kept = launch_order.communicators_overlap()
    recorder = Recorder(is_order_kept=is_order_kept)
    layer = Layer("hierarchical_alltoall", "ep4", 4, recorder)
    tp = PeerGroup(name="tp", process_group=dist.group.WORLD, size=2, rank=0, nodes=(0, 0))
    with recorder, torch.no_grad():
        other = RecordedStream(recorder, "other micro-batch")
        dispatch(layer.exchange, *layer.inputs())
        with torch.cuda.stream(other):
            recorder.collective(torch.empty(2), torch.ones(1), torch.ones(1), tp)
    times = times_in_one_queue(
        recorder.queue,
        of_stream=True,
        in_launch_order=is_order_kept,
        durations=DURATIONS | {"node": 0.3},
    )
    starts = {entry.group: times[entry][0] for entry in recorder.collectives()}
    end = max(times[entry][1] for entry in recorder.collectives() if entry.group != "tp")
    assert set(starts) == {"rail", "node", "tp"}
    assert least <= starts["tp"] / end <= most


def test_cpu_ranks_set_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    configure()
    assert VARIABLE not in os.environ and launch_order.communicators_overlap()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("autoload", ["0", "1"])
@pytest.mark.parametrize(
    ("value", "in_script", "overlap"),
    [("1", "", True), (None, "1", False)],
)
def test_the_value_at_the_start_is_known_by_the_layer_spec(
    autoload: str, value: str | None, in_script: str, overlap: bool
) -> None:
    """Groups are there before anything of ours is called, and the script may have set a value."""
    result = run_python(
        "-c",
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        f"if {in_script!r}: os.environ['{VARIABLE}'] = {in_script!r}\n"
        "from monta_megatron.exchange import launch_order\n"
        "torch.accelerator.is_available = lambda: True\n"
        "launch_order.versions = lambda: ((2, 27, 5), (12, 9))\n"
        "launch_order.set_launch_order()\n"
        "print(launch_order.communicators_overlap())",
        MONTA_AUTOLOAD=autoload,
        **({} if value is None else {VARIABLE: value}),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(overlap)
