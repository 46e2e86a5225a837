"""Host and device time of an exchange's passes on a GPU, without its collectives.

Streams, events, allocations and Triton launches are real. A collective is a stand-in that orders
streams as NCCL does and copies what was recorded, so device times are those of copies and sums of a
few rows: latencies.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, TypeAlias
from unittest import mock

import torch
from replay import (
    Layer,
    Recorded,
    ReplayCase,
    StandIn,
    in_place_of_start,
    key_of,
    order_on,
    received_by,
)

from monta_megatron.chains.program import Operation
from monta_megatron.exchange import executor
from monta_megatron.exchange.buffers import Buffers, Columns

NUM_CHUNKS = (1, 4)
WARM_UP, ROUNDS, CALLS = 3, 10, 50
# NCCL's part of a collective's launch, of the published 21.8 us (docs/calibration.md).
NCCL_LAUNCH_US = 18.6

# "chain x chunks, kernels, pass" -> us of host and device.
PassTimes: TypeAlias = dict[str, tuple[float, float]]


class _Delivers(StandIn):
    """Collectives that order streams and bring what was recorded, at once."""

    def start(self, usual: Any, buffers: Buffers, operation: Operation, how: Any) -> list[Any]:
        _, arriving = self._messages[key_of(self._layer, buffers, operation)]
        columns = zip(received_by(buffers, operation), arriving, strict=True)
        assert operation.group is not None, f"{operation.kind} is no collective"
        return self.on_stream(operation.group, lambda: [into.copy_(one) for into, one in columns])


def pass_times(
    cases: Sequence[ReplayCase], records: Sequence[Recorded], device: torch.device, repeats: int
) -> PassTimes:
    """Medians, of plain passes in one chunk and in several, by both kinds of kernels."""
    times: PassTimes = {}
    for case, recorded in zip(cases, records, strict=True):
        if not case.pipelined and case.case.etp == 1 and case.case.num_chunks in NUM_CHUNKS:
            for fused in (False, True):
                of_layer = _of_layer(case, recorded, fused, device, repeats)
                times |= {_name(case, fused, name): us for name, us in of_layer.items()}
    return times


def _name(case: ReplayCase, fused: bool, pass_name: str) -> str:
    kernels = "Triton" if fused else "PyTorch"
    return f"{case.case.chain} x{case.case.num_chunks}, {kernels}, {pass_name}"


def host_line(device: torch.device, times: PassTimes) -> str:
    """The line `host` of a cluster file, of this host and its GPU.

    Args:
        device: the GPU.
        times: `pass_times`.
    """
    from fake_world import fake_world
    from host_figures import CHAIN, CHUNKS, EP, OPERATIONS, PASS, host_figures
    from launch_counts import count_launches

    with fake_world():
        figures = host_figures()
        counted = {chunks: count_launches(CHAIN, EP, chunks, "fused") for chunks in (1, CHUNKS)}
    launch_us, allocation_us, stand_in_us = _parts_us(device)
    of_pass, num_launches, num_allocations = {}, 0, 0
    for chunks, of_layer in counted.items():
        counts = of_layer[PASS]
        allocations = counts.tensor_operations - counts.kernel_launches
        host_us, _ = times[f"{CHAIN} x{chunks}, Triton, {PASS}"]
        of_pass[chunks] = (
            host_us
            - launch_us * counts.kernel_launches
            - allocation_us * allocations
            - stand_in_us * counts.collectives
        )
        num_launches += counts.kernel_launches
        num_allocations += allocations
    stage_us = max((of_pass[CHUNKS] - of_pass[1]) / (CHUNKS - 1) / OPERATIONS, 0.0)
    operations_us = launch_us * num_launches + allocation_us * num_allocations
    values = {
        "collective_us": float(figures["collective_us"]) + NCCL_LAUNCH_US,
        "collective_peer_us": float(figures["collective_peer_us"]),
        "operation_us": operations_us / (num_launches + num_allocations),
        "counts_to_host_us": _counts_to_host_us(device),
        "counts_us": float(figures["counts_us"]),
        "pass_us": max(of_pass[1] - OPERATIONS * stage_us, 0.0),
        "stage_us": stage_us,
    }
    gpu = torch.cuda.get_device_name(device)
    source = f"scripts/gpu_check.sh, {gpu}, {figures['processor']}, torch {torch.__version__}"
    costs = ", ".join(f"{name}: {us:.1f}" for name, us in values.items())
    return f"host: {{{costs}, source: '{source}'}}\n"


def _counts_to_host_us(device: torch.device) -> float:
    """The time of a copy of some integers to the host, with the wait for it."""
    counts = torch.zeros(1024, dtype=torch.int64, device=device)
    counts.cpu()
    begin_s = time.perf_counter()
    for _ in range(CALLS):
        counts.cpu()
    return (time.perf_counter() - begin_s) * 1e6 / CALLS


def _parts_us(device: torch.device) -> tuple[float, float, float]:
    """Host time of a Triton launch, an allocation, and a collective's stand-in with its wait."""
    from monta_megatron.exchange.kernels.sums import reduce_ranks

    rows, into = torch.empty(2, 16, 256, dtype=torch.bfloat16, device=device)
    stream = torch.cuda.Stream(device, priority=-1)

    def collective() -> None:
        order_on(stream, device, lambda: into.copy_(into)).wait()

    calls = (
        lambda: reduce_ranks(Columns(rows), Columns(into), torch.float32, 1),
        lambda: torch.empty(64, 64, device=device),
        collective,
    )
    launch_us, allocation_us, stand_in_us = (_host_us(call, device) for call in calls)
    return launch_us, allocation_us, stand_in_us


def _host_us(call: Callable[[], object], device: torch.device) -> float:
    """The least over rounds of a call's mean, where the device has time to keep up."""
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize(device)
        before = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - before) / CALLS * 1e6)
    return min(rounds)


def _of_layer(
    case: ReplayCase, recorded: Recorded, fused: bool, device: torch.device, repeats: int
) -> PassTimes:
    layer = Layer.of(case, device, fused)
    stand_in = _Delivers(layer, device, recorded.messages)
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(WARM_UP + repeats):
        with in_place_of_start(stand_in.start), _timed(times, device):
            layer.run()
    return {
        name: tuple(map(median, zip(*each[WARM_UP:], strict=True)))  # type: ignore[misc]
        for name, each in times.items()
    }


@contextmanager
def _timed(times: dict[str, list[tuple[float, float]]], device: torch.device) -> Iterator[None]:
    """Context in which the host and device times of each pass are noted."""
    run = executor.run

    def timed(exchange: Any, pass_: Any, columns: Any) -> Any:
        torch.cuda.synchronize(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        before = time.perf_counter()
        result = run(exchange, pass_, columns)
        host_us = (time.perf_counter() - before) * 1e6
        end.record()
        torch.cuda.synchronize(device)
        times[pass_.name].append((host_us, begin.elapsed_time(end) * 1e3))
        return result

    with mock.patch.object(executor, "run", timed):
        yield
