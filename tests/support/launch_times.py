"""Host time of a layer's exchange where nothing is waited for: real operations on tiny CPU tensors.

Programs are those of a device; streams and collectives do nothing, so what is left is Python, the
dispatch of operations and their work on next to no data. A launch on a GPU costs something else:
the figures compare two states of the code on one machine, interleaved, and are good for no more.
They are this thread's time, so that what else runs on the machine matters less.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any
from unittest import mock

import torch
from fake_world import exchanged_counts
from launch_counts import (
    ROWS,
    Rows,
    layer_inputs,
    make_dispatcher,
    run_layer,
    sizes_of_permutation,
)

from monta_megatron.exchange import count_messages, executor, operations, streams

WARM_UP = 2


class _Nothing:
    """In place of a stream, an event and a collective."""

    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self) -> "_Nothing":
        return self

    def wait(self, *_: Any) -> None:
        pass

    wait_event = wait_stream = wait

    def get_future_result(self) -> Any:
        raise RuntimeError("nothing has no watchdog")


def host_us(
    chain_name: str, ep: int, num_chunks: int, repeats: int, kernels: str = "torch"
) -> dict[str, float]:
    """Host time of each of `ROWS` in microseconds, the median of so many layers.

    Triton kernels go through Triton's own launch path; see `compiled_kernels.no_driver`.
    """
    made = make_dispatcher(chain_name, ep, kernels, moe_monta_num_chunks=num_chunks)
    made.cuda_dtoh_stream = _Nothing()
    counts = made.setup.counts
    copied, routed = exchanged_counts(counts.count_messages)
    counts.copy_to_host = lambda *_: lambda: counts.count_messages.read(copied.numpy())
    inputs, driver = layer_inputs(routed, "cpu"), nullcontext()
    if kernels == "fused":
        from compiled_kernels import no_driver

        driver = no_driver()
    layers: list[dict[str, float]] = []
    # The work on the data is the host thread's own, as launches are.
    torch.set_num_threads(1)
    with _no_device(kernels), driver, torch.no_grad():
        for _ in range(WARM_UP + repeats):
            rows = Rows(_now_us)
            layers.append(rows.spent)
            run_layer(made, inputs, rows)
    return {name: median(each[name] for each in layers[WARM_UP:]) for name in ROWS}


def _start(output: torch.Tensor, *_: Any) -> _Nothing:
    """In place of a collective; ids that it would bring are in range."""
    output.zero_()
    return _Nothing()


def _now_us() -> float:
    return time.thread_time() * 1e6


@contextmanager
def _no_device(kernels: str) -> Iterator[None]:
    """Context in which CPU tensors take a device's path, and nothing is sent."""
    stream, inside = _Nothing(), nullcontext()
    streams._drawn.cache_clear()
    with (
        mock.patch.multiple(
            torch.cuda,
            Stream=_Nothing,
            stream=lambda stream: inside,
            set_stream=lambda stream: None,
            current_stream=lambda device=None: stream,
            current_device=lambda: torch.device("cpu"),
        ),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
        mock.patch.object(executor, "streams_for", streams.CudaStreams),
        mock.patch.multiple(operations, start_all_to_all=_start, start_all_gather=_start),
        mock.patch.object(count_messages, "is_fused", lambda *_: kernels == "fused"),
        sizes_of_permutation(),
    ):
        yield
    streams._drawn.cache_clear()
