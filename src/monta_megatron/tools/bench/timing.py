"""Interleaved repeats: every candidate once per repeat, in a rotated order.

The time of a run is that of its slowest rank. Times stay on their ranks until the end, so that
nothing but the candidates uses the network while they are measured.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from monta_megatron.tools.joined_ranks import wait_for_all


@dataclass(frozen=True, kw_only=True)
class Timings:
    """The times of all candidates.

    Attributes:
        times_ms: [repeats, candidates] time of the slowest rank.
        nic_bytes: [candidates] mean bytes that the NICs sent per run, summed over nodes.
    """

    times_ms: NDArray[np.float64]
    nic_bytes: NDArray[np.float64]


def time_interleaved(
    runs: Sequence[Callable[[int], object]],
    repeats: int,
    warmup: int,
    read_sent_bytes: Callable[[], int],
    on_repeat: Callable[[], None] = lambda: None,
) -> Timings:
    """Time `runs` side by side.

    Args:
        runs: one function per candidate, called by all ranks together with the number of the
            repeat, negative in the warm-up.
        repeats: timed calls of each.
        warmup: untimed calls of each before those.
        read_sent_bytes: bytes sent so far by the NICs that this rank reads, 0 if it reads none.
        on_repeat: called after each repeat, warm-up included.
    """
    num_runs = len(runs)
    times_ms: NDArray[np.float64] = np.zeros((repeats, num_runs))
    sent_bytes: NDArray[np.float64] = np.zeros(num_runs)
    with _garbage_collected_between_repeats():
        for repeat in range(-warmup, repeats):
            gc.collect()
            for turn in range(num_runs):
                position = (turn + repeat) % num_runs
                # The NICs are read while no rank sends: after one barrier, before another.
                wait_for_all()
                sent_before_bytes = read_sent_bytes()
                wait_for_all()
                start = time.perf_counter()
                runs[position](repeat)
                torch.cuda.synchronize()
                elapsed_s = time.perf_counter() - start
                wait_for_all()
                if repeat >= 0:
                    times_ms[repeat, position] = elapsed_s * 1e3
                    sent_bytes[position] += read_sent_bytes() - sent_before_bytes
            on_repeat()

    slowest_ms, all_sent_bytes = torch.from_numpy(times_ms), torch.from_numpy(sent_bytes)
    dist.all_reduce(slowest_ms, op=dist.ReduceOp.MAX)
    dist.all_reduce(all_sent_bytes)
    return Timings(times_ms=slowest_ms.numpy(), nic_bytes=all_sent_bytes.numpy() / repeats)


@contextmanager
def _garbage_collected_between_repeats() -> Iterator[None]:
    """No collection inside a run, and none of the objects that exist already."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
