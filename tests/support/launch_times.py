"""Host time of a layer's exchange where nothing is waited for: real operations on tiny CPU tensors.

Programs are those of a device, streams and collectives do nothing, so what is left is Python, the
dispatch of operations and their work on next to no data. A launch on a GPU costs something else:
the figures compare two states of the code on one machine, interleaved, and are good for no more.
They are this thread's time, so that what else runs on the machine matters less.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from statistics import median
from typing import Any
from unittest import mock

import torch
from fake_world import exchanged_counts
from launch_counts import (
    ROWS,
    counting,
    layer_inputs,
    make_dispatcher,
    permute_sizes,
    run_layer,
    unpermute_sizes,
)
from megatron.core.transformer.moe import token_dispatcher as stock

from monta_megatron.common.torch_private import ALL_GATHER, ALL_TO_ALL
from monta_megatron.exchange import count_messages, executor, operations, streams
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.count_messages import CountMessages, MicroBatchCounts

WARM_UP = 2
# From when the counts are on the host to when it starts the first collective of dispatch: nothing
# that a GPU has queued hides it.
EXPOSED = "counts to first collective"


class _NoStream:
    """In place of a `torch.cuda.Stream`, and of its events."""

    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self) -> "_NoStream":
        return self

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


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
    # On the host, where the counts come from, "auto" is PyTorch.
    options = {"moe_monta_kernels": "auto" if kernels == "fused" else "torch"}
    with mock.patch.object(stock.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream"):
        made = make_dispatcher(chain_name, ep, moe_monta_num_chunks=num_chunks, **options)
    copied, routed = exchanged_counts(made._counts.count_messages)
    made.cuda_dtoh_stream = _NoStream()
    inputs = layer_inputs(routed, "cpu")
    times = _Times()
    made._counts.copy_to_host = times.counts_arrive(made._counts.count_messages, copied)
    for owner, name in counting(made):
        setattr(owner, name, times.in_counts(getattr(owner, name)))
    is_fused, driver = kernels == "fused", nullcontext()
    if is_fused:
        from compiled_kernels import no_driver

        driver = no_driver()
    with _one_thread(), _no_device(is_fused, times), driver, torch.no_grad():
        for _ in range(WARM_UP + repeats):
            times.begin()
            run_layer(made, inputs, times.row)
    return {
        name: of_layers(each[name] for each in times.layers[WARM_UP:]) for name in (*ROWS, EXPOSED)
    }


class _Times:
    """Microseconds by row; what runs inside another row is not the outer one's."""

    def __init__(self) -> None:
        self.layers: list[dict[str, float]] = []
        self._inside_us = 0.0
        # When the counts of the layer under way were on the host; None behind the first collective.
        self._arrived: float | None = None

    def begin(self) -> None:
        self.layers.append(defaultdict(float))

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        outside_us, self._inside_us = self._inside_us, 0.0
        start = time.thread_time()
        yield
        spent_us = (time.thread_time() - start) * 1e6
        self.layers[-1][name] += spent_us - self._inside_us
        self._inside_us = outside_us + spent_us

    def counts_arrive(self, count_messages: CountMessages, copied: torch.Tensor) -> Any:
        """In place of `copy_to_host` of a count exchange: what it brings, once it is waited for."""

        def read() -> MicroBatchCounts:
            self._arrived = time.thread_time()
            return count_messages.read(copied.numpy())

        return lambda *_: read

    def collective_starts(self) -> None:
        """The host is about to start a collective of a pass."""
        if self._arrived is not None:
            self.layers[-1][EXPOSED] = (time.thread_time() - self._arrived) * 1e6
            self._arrived = None

    def in_counts(self, function: Any) -> Any:
        def timed(*args: Any) -> Any:
            with self.row("counts"):
                return function(*args)

        return timed


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context in which the work on the data is the host thread's own, as launches are."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


@contextmanager
def _no_device(is_fused: bool, times: _Times) -> Iterator[None]:
    """Context in which the CPU's tensors take a device's path through the exchange."""
    stream = _NoStream()
    inside = nullcontext()
    starts = {
        "start_all_to_all": _zeroed(_start_all_to_all, times),
        "start_all_gather": _zeroed(_start_all_gather, times),
    }
    streams._drawn.cache_clear()
    with ExitStack() as context:
        for patch in (
            mock.patch.multiple(
                torch.cuda,
                Stream=_NoStream,
                stream=lambda stream: inside,
                set_stream=lambda stream: None,
                current_stream=lambda device=None: stream,
                current_device=lambda: torch.device("cpu"),
            ),
            mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
            mock.patch.object(executor, "streams_for", streams.CudaStreams),
            mock.patch.multiple(operations, **starts),
            mock.patch.object(count_messages, "is_fused", lambda *_: is_fused),
            mock.patch.multiple(stock, permute=permute_sizes, unpermute=unpermute_sizes),
        ):
            context.enter_context(patch)
        yield
    streams._drawn.cache_clear()


def _start_all_to_all(
    output: torch.Tensor,
    input_: torch.Tensor,
    receive: list[int],
    send: list[int],
    group: PeerGroup,
) -> Any:
    """As on a device, where `collectives.start_all_to_all` asks where the rows are."""
    return group.process_group.alltoall_base(output, input_, receive, send, ALL_TO_ALL)


def _start_all_gather(
    output: torch.Tensor,
    input_: torch.Tensor,
    receive: list[int],
    send: list[int],
    group: PeerGroup,
) -> Any:
    """Likewise."""
    if len(set(receive)) == 1:
        return group.process_group._allgather_base(output, input_, ALL_GATHER)
    outputs = list(output.split(receive))
    # A fake group copies a message to itself, which has to fit.
    return group.process_group.alltoall(outputs, outputs, ALL_TO_ALL)


def _zeroed(start: Any, times: _Times) -> Any:
    """A collective behind which the message holds ids that are in range."""

    def started(output: torch.Tensor, *arguments: Any) -> Any:
        times.collective_starts()
        work = start(output, *arguments)
        output.zero_()
        return work

    return started
