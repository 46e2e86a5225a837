"""Host time of a layer's exchange where nothing is waited for: real operations on tiny CPU tensors.

Programs are those of a device; streams and collectives do nothing, so what is left is Python, the
dispatch of operations and their work on next to no data. A launch on a GPU costs something else:
the figures compare two states of the code on one machine, interleaved, and are good for no more.
They are this thread's time, so that what else runs on the machine matters less.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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
from monta_megatron.exchange.count_messages import MicroBatchCounts

WARM_UP = 2
# From when the counts are on the host to when it starts the first collective of dispatch: nothing
# that a GPU has queued hides it.
EXPOSED = "counts to first collective"


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
    chain_name: str,
    ep: int,
    num_chunks: int,
    repeats: int,
    kernels: str = "torch",
    of_layers: Callable[[Iterable[float]], float] = median,
) -> dict[str, float]:
    """Host time of each of `ROWS` and of `EXPOSED`, in microseconds, over so many layers.

    Triton kernels go through Triton's own launch path; see `compiled_kernels.no_driver`.
    """
    made = make_dispatcher(chain_name, ep, kernels, moe_monta_num_chunks=num_chunks)
    made.cuda_dtoh_stream = _Nothing()
    counts = made._counts
    copied, routed = exchanged_counts(counts.count_messages)
    # When the counts of the layer under way were on the host; 0 behind the first collective.
    arrived_us, layers = 0.0, list[dict[str, float]]()

    def arrive() -> MicroBatchCounts:
        nonlocal arrived_us
        arrived_us = _now_us()
        return counts.count_messages.read(copied.numpy())

    def start(output: torch.Tensor, *_: Any) -> _Nothing:
        nonlocal arrived_us
        if arrived_us:
            layers[-1][EXPOSED] = _now_us() - arrived_us
            arrived_us = 0.0
        # Ids that are in range.
        output.zero_()
        return _Nothing()

    counts.copy_to_host = lambda *_: arrive
    inputs, driver = layer_inputs(routed, "cpu"), nullcontext()
    if kernels == "fused":
        from compiled_kernels import no_driver

        driver = no_driver()
    # The work on the data is the host thread's own, as launches are.
    torch.set_num_threads(1)
    with _no_device(start, kernels), driver, torch.no_grad():
        for _ in range(WARM_UP + repeats):
            rows = Rows(_now_us)
            layers.append(rows.spent)
            run_layer(made, inputs, rows)
    return {name: of_layers(each[name] for each in layers[WARM_UP:]) for name in (*ROWS, EXPOSED)}


def _now_us() -> float:
    return time.thread_time() * 1e6


@contextmanager
def _no_device(start: Callable[..., _Nothing], kernels: str) -> Iterator[None]:
    """Context in which CPU tensors take a device's path, and `start` stands in for collectives."""
    stream, inside = _Nothing(), nullcontext()
    streams._drawn.cache_clear()
    with ExitStack() as context:
        for patch in (
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
            mock.patch.multiple(operations, start_all_to_all=start, start_all_gather=start),
            mock.patch.object(count_messages, "is_fused", lambda *_: kernels == "fused"),
            sizes_of_permutation(),
        ):
            context.enter_context(patch)
        yield
    streams._drawn.cache_clear()
