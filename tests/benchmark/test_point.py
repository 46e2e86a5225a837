"""The data, the times and the limit of one point, on one rank without a launch."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equal import assert_equal
from test_bench_numbers import BASE, FLAT, routing_map

from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.tools.bench import measure
from monta_megatron.tools.bench.candidates import make_batch
from monta_megatron.tools.bench.measure import time_interleaved
from monta_megatron.tools.bench.settings import parse_settings


def test_every_rank_has_its_own_data_wherever_it_is_made() -> None:
    settings = parse_settings(BASE, 4)
    device = torch.device("cpu")
    first, second, again = (make_batch(settings, rank, device) for rank in (0, 1, 0))
    for name in ("hidden", "routing_map", "probs", "output_gradient"):
        assert_equal(getattr(again, name), getattr(first, name), name)
    for name in ("hidden", "probs", "output_gradient"):
        assert not torch.equal(getattr(first, name), getattr(second, name)), name
    assert not torch.equal(first.hidden, first.output_gradient)
    assert first.probs.sum(dim=1).tolist() == pytest.approx([1.0] * settings.tokens)
    assert not first.probs[~first.routing_map].any()


def test_times_are_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds pass between two looks at the clock."""
    clock = SimpleNamespace(perf_counter=count(step=2).__next__)
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(measure.dist, "all_reduce", lambda values, op=None: None)
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    assert time_interleaved([list, list], repeats=1, on_repeat=list).tolist() == [[2e3, 2e3]]


def test_a_gpu_times_single_runs_behind_one_that_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of 1, 2, 3 ms and so on by the GPU's clock, of which the first is not timed."""
    clock_ms, calls = [0.0], count(start=1)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.ms = clock_ms[0]

        def elapsed_time(self, end: "Event") -> float:
            return end.ms - self.ms

    def run() -> None:
        clock_ms[0] += next(calls)

    monkeypatch.setattr(measure, "gpu_name", lambda: "a GPU")
    monkeypatch.setattr(measure.torch.cuda, "Event", Event)
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "wait_for_all", lambda: None)
    monkeypatch.setattr(measure.dist, "all_reduce", lambda values, op=None: None)
    times_ms = time_interleaved([run], repeats=2, on_repeat=list)
    assert times_ms.tolist() == [[ms] for ms in (*range(2, 12), *range(13, 23))]


def test_times_are_the_slowest_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one other rank takes 1,000 s for each run."""

    def all_reduce(values: torch.Tensor, op: Any = None) -> None:
        if op == measure.dist.ReduceOp.MAX:
            values.clamp_(min=1e6)

    monkeypatch.setattr(measure.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    calls: list[str] = []
    runs = [lambda name=name: calls.append(name) for name in "abc"]
    times_ms = time_interleaved(runs, repeats=4, on_repeat=lambda: calls.append(" "))
    assert times_ms.tolist() == [[1e6] * 3] * 4
    # Each repeat in an order of its own, the same on every rank.
    orders = "".join(calls).split()
    assert [sorted(order) for order in orders] == [list("abc")] * 4 and len(set(orders)) > 2
    calls.clear()
    time_interleaved(runs, repeats=4, on_repeat=lambda: calls.append(" "))
    assert "".join(calls).split() == orders


@pytest.mark.parametrize(
    ("phase", "limit_ms"), [("forward", 0.002048), ("forward_backward", 0.004096)]
)
def test_limit_of_a_point(phase: Any, limit_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens of 64 bytes cross at 1 Gbit/s: 1.024 us there, and as much back."""
    monkeypatch.setattr(measure.dist, "all_reduce", lambda crossing: None)
    emulated = EmulatedCluster(nodes=2, ranks_per_node=2, inter_mbit=1000)
    batch = SimpleNamespace(routing_map=routing_map((0, 2, 4), (4, 5)), hidden=torch.ones(2, 1, 16))
    bench: Any = SimpleNamespace(emulated=emulated, layout=FLAT, nodes=FLAT.nodes, batch=batch)
    assert measure.limit_ms(bench, phase) == pytest.approx(limit_ms)
    # Of a cluster file, the two ranks of a node share its rate: 1 Gbit/s again.
    bench.emulated, bench.cluster = None, load_cluster("h100_8x_ndr").at_rate("inter", 1e-3)
    limit_ms *= 0.125 / (2 * bench.cluster.rate_of("inter").gbytes_per_s)
    assert measure.limit_ms(bench, phase) == pytest.approx(limit_ms)
    bench.cluster = None
    assert measure.limit_ms(bench, phase) is None
