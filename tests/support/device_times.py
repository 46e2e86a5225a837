"""Host and device time of an exchange's passes on a GPU, without its collectives.

Streams, events, allocations and Triton launches are real. A collective is a stand-in that orders
streams as NCCL does and copies what was recorded, so device times are those of copies and sums of a
few rows: latencies.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeAlias
from unittest import mock

import torch
from replay import Recorded, Replay, ReplayCase

from monta_megatron.exchange import executor

NUM_CHUNKS = (1, 4)
WARM_UP = 3

# us of host and device.
Times: TypeAlias = tuple[float, float]


class Delivers(Replay):
    """Collectives order streams and bring what was recorded, at once."""

    def deliver(self, key: Any, sent: Any, received: Any, spent: Any) -> None:
        for into, message in zip(received, self._messages[key][1], strict=True):
            into.copy_(message)


def pass_times(
    cases: Sequence[ReplayCase], records: Sequence[Recorded], device: torch.device, repeats: int
) -> dict[str, Times]:
    """Medians by chain, kernels and pass: of plain passes in one chunk and in several."""
    medians = {}
    for case, recorded in zip(cases, records, strict=True):
        if case.pipelined or case.case.etp > 1 or case.case.num_chunks not in NUM_CHUNKS:
            continue
        for fused, kernels in ((False, "PyTorch"), (True, "Triton")):
            replay = Delivers(case, recorded, device, fused=fused)
            times: dict[str, list[Times]] = defaultdict(list)
            with mock.patch.object(executor, "run", partial(_timed, executor.run, times)):
                for _ in range(WARM_UP + repeats):
                    replay.run()
            for name, each in times.items():
                host_us, device_us = map(median, zip(*each[WARM_UP:], strict=True))
                label = f"{case.case.chain} x{case.case.num_chunks}, {kernels}, {name}"
                medians[label] = host_us, device_us
    return medians


def _timed(
    run: Callable[..., Any], times: dict[str, list[Times]], exchange: Any, pass_: Any, columns: Any
) -> Any:
    """`executor.run`, whose times on the host and the device are noted."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    before = time.perf_counter()
    result = run(exchange, pass_, columns)
    host_us = (time.perf_counter() - before) * 1e6
    end.record()
    torch.cuda.synchronize()
    times[pass_.name].append((host_us, begin.elapsed_time(end) * 1e3))
    return result
