"""Faults to plant in the executor: each one must make a test fail, or the tests prove nothing."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from monta_megatron.chains import CHAINS
from monta_megatron.chains.lanes import DISPATCH_BACKWARD
from monta_megatron.exchange import autograd, walk
from monta_megatron.exchange.payload import Lanes


def two_rows_swapped() -> Any:
    """The first two rows of every copy into place change places."""
    original = walk._row_indices

    def swapped(*args: Any) -> tuple[torch.Tensor, ...]:
        indices = [index.clone() for index in original(*args)]
        for index in indices:
            if len(index) > 1:
                index[:2] = index[:2].flip(0)
        return tuple(indices)

    return mock.patch.object(walk, "_row_indices", swapped)


def last_chunk_skipped() -> Any:
    """The rows of the last chunk never reach their place."""
    put, allocate_outputs = walk._Pipeline._put, walk._Pipeline._allocate_outputs

    def skip(self: Any, bound: Any, chunk: int) -> None:
        if chunk < self.exchange.bound.num_chunks - 1:
            put(self, bound, chunk)
        else:
            self._wait(chunk)

    def allocate_as_nan(self: Any) -> Lanes:
        # Fresh memory may still hold the right rows, of the run with stock.
        outputs = allocate_outputs(self)
        for lane in outputs.tensors():
            lane.fill_(torch.nan)
        return outputs

    return mock.patch.multiple(walk._Pipeline, _put=skip, _allocate_outputs=allocate_as_nan)


def probability_gradients_dropped() -> Any:
    """The backward pass of dispatch forgets one lane."""
    original = walk.run

    def run(exchange: Any, way: Any, lanes: Lanes) -> Lanes:
        result = original(exchange, way, lanes)
        if way is DISPATCH_BACKWARD:
            return Lanes(rows=result.rows, probs=torch.zeros_like(result.probs))
        return result

    return mock.patch.object(autograd, "run", run)


def wrong_split() -> Any:
    """Every rank sends the first peer a row that belongs to the second, and expects no other."""
    original = walk._Pipeline._collective

    def collective(self: Any, bound: Any, group: Any, chunk: int) -> Any:
        send, receive = bound.send.copy(), bound.receive.copy()
        send[:, 0] += 1
        send[:, 1] -= 1
        receive += {0: 1, 1: -1}.get(group.rank, 0)
        wrong = dataclasses.replace(bound, send=send, receive=receive)
        return original(self, wrong, group, chunk)

    return mock.patch.object(walk._Pipeline, "_collective", collective)


def serial_loop() -> Any:
    """No chunk starts before the one before it is done."""

    def order(depths: Any, num_chunks: int) -> list[tuple[int, int]]:
        return [(stage, chunk) for chunk in range(num_chunks) for stage in range(len(depths))]

    # The chain is frozen.
    return mock.patch.dict(vars(CHAINS["alltoall_allgather"]), order=order)


FAULTS: dict[str, Callable[[], Any]] = {
    fault.__name__: fault
    for fault in (
        two_rows_swapped,
        last_chunk_skipped,
        probability_gradients_dropped,
        wrong_split,
        serial_loop,
    )
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """While this lasts, the executor has the named fault on this rank."""
    with FAULTS[name]():
        yield
