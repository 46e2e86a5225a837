"""Integers of all ranks of a group, gathered while training goes on: nothing waits for them.

Notation: S = ranks of the group, K = integers of a rank.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from monta_megatron.exchange.errors import ExchangeError, passes_under_way


class HostWait(NamedTuple):
    """A collective of an exchange, outside its passes, that the host may be waiting for.

    Attributes:
        what: the collective, with what it belongs to.
        process_group: the ranks of the exchange.
        since_s: since when, by `time.monotonic`.
    """

    what: str
    process_group: dist.ProcessGroup
    since_s: float

    def __str__(self) -> str:
        ranks = dist.get_process_group_ranks(self.process_group)
        rank = dist.get_group_rank(self.process_group, dist.get_rank())
        named = ", ".join(map(str, ranks))
        return f"{self.what}, group tp_ep (rank {rank} of {len(ranks)}: ranks {named})"


# The latest last; see `time_limit`.
host_waits: list[HostWait] = []


@contextmanager
def naming_failure(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Say what failed where a peer has died or stopped, as the executor does of its stages.

    Args:
        what: the collective, with what it belongs to.
        group: the ranks of an exchange.

    Raises:
        ExchangeError: the collective failed or timed out.
    """
    wait = HostWait(what, group, time.monotonic())
    host_waits.append(wait)
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(f"{wait} failed: {error}\n{passes_under_way()}") from error
    finally:
        host_waits.remove(wait)


class Gathering:
    """One gathering after the other, each finished much later than it is started.

    Args:
        group: the ranks, which start and finish in the same order among the group's collectives.
        what: for errors, see `naming_failure`.
    """

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group = group
        self._what = what
        self._gathered: torch.Tensor | None = None
        self._wait: Callable[[], object] = lambda: None

    @property
    def is_under_way(self) -> bool:
        """Whether one was started and not finished."""
        return self._gathered is not None

    def start(
        self, integers: Sequence[int], device: torch.device, side_stream: torch.cuda.Stream
    ) -> None:
        """Send [K] integers of this rank; K is the same on all ranks.

        Args:
            integers: of this rank.
            device: that the group serves.
            side_stream: where they are copied to it and back.
        """
        with naming_failure(self._what, self._group), torch.cuda.stream(side_stream):
            sent = torch.tensor(integers, dtype=torch.int64)
            if device.type == "cuda":
                sent = sent.pin_memory().to(device, non_blocking=True)
            gathered = sent.new_empty(self._group.size() * len(sent))
            work = dist.all_gather_into_tensor(gathered, sent, group=self._group, async_op=True)
            assert work is not None
            self._wait = work.wait
            if device.type == "cuda":
                # The side stream waits for the collective, the host for nothing.
                work.wait()
                gathered = gathered.to("cpu", non_blocking=True)
                self._wait = side_stream.record_event().synchronize
        self._gathered = gathered

    def finish(self) -> NDArray[np.int64]:
        """[S, K] what all ranks sent; they have long arrived."""
        assert self._gathered is not None, "not under way"
        with naming_failure(self._what, self._group):
            self._wait()
        gathered, self._gathered = self._gathered.numpy(), None
        # [S * K] -> [S, K]
        return gathered.reshape(self._group.size(), -1)
