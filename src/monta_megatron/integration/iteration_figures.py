"""Times of an iteration's passes, by which the next candidates are chosen, on all ranks.

    iteration i        every rank times its passes
    first exchange of  the ranks start to gather these times, and nothing waits for them
    iteration i + 1
    end of i + 1       they are there, and decide what runs in iteration i + 2

Notation: S = ranks of the exchange, P = passes of an iteration.
"""

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from monta_megatron.exchange.counts import Gathering
from monta_megatron.exchange.pass_times import PassTimes
from monta_megatron.integration.ranks import check_same_config


class IterationFigures:
    """Gathers the times of the iteration before the one under way.

    Args:
        group: the ranks of the exchange.
        pass_times: times the passes.
    """

    def __init__(self, group: dist.ProcessGroup, pass_times: PassTimes) -> None:
        self._group, self._pass_times = group, pass_times
        self._gathering = Gathering(group, "between iterations: exchange of times")
        # Number of the iteration that has ended, until the next one's first exchange.
        self._finished: int | None = None

    def start_gathering(self, device: torch.device, side_stream: torch.cuda.Stream) -> bool:
        """Start to gather the times of the iteration that has ended; False if that was done."""
        if self._finished is None:
            return False
        # The device has done these passes: the host has waited for counts after them.
        figures = [self._finished, *self._pass_times.collect().tolist()]
        self._gathering.start(figures, device, side_stream)
        self._finished = None
        return True

    def end_iteration(self, number: int) -> NDArray[np.int64] | None:
        """End the iteration under way.

        Args:
            number: of the iteration that ends.

        Returns:
            [S, P] the gathered times of the iteration before it; None if there was none.

        Raises:
            ExchangeError: a rank has died or stopped.
            ValueError: the ranks gathered different iterations.
        """
        pass_us = self._gathered() if self._gathering.is_under_way else None
        self._finished = number
        self._pass_times.end_iteration()
        return pass_us

    def _gathered(self) -> NDArray[np.int64]:
        # [S, 1], [S, P]
        numbers, pass_us = np.split(self._gathering.finish(), [1], axis=1)
        ranks = dist.get_process_group_ranks(self._group)
        check_same_config([{"iteration": number} for number in numbers[:, 0].tolist()], ranks)
        return pass_us
