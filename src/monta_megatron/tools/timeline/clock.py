"""One clock for the recordings of all ranks."""

import socket

import numpy as np
import torch
import torch.distributed as dist

from monta_megatron.common.nodes import BOOT_ID
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.exchange.step_times import now_us

NUM_BARRIERS = 31


class Clock:
    """Offset of this rank's clock from the first rank's; created by all ranks of the launch.

    On several hosts, ranks read their clocks right after barriers, which they leave at nearly the
    same time: the median of the differences is the offset. Barriers are on the host, by Gloo.

    Attributes:
        name: how the offset was determined.
        offset_us: this rank's clock minus the first rank's.
        error_us: half the interquartile range of the differences; the largest of any rank.
    """

    def __init__(self) -> None:
        self.name, self.offset_us, self.error_us = "the monotonic clock of one host", 0.0, 0.0
        if len(set(gather_objects(_host()))) == 1:
            return
        here_us = torch.zeros(NUM_BARRIERS, dtype=torch.float64)
        barrier = torch.zeros(1)
        for index in range(NUM_BARRIERS):
            dist.all_reduce(barrier)
            here_us[index] = now_us()
        first_us = here_us.clone()
        dist.broadcast(first_us, src=0)
        low_us, middle_us, high_us = np.percentile((here_us - first_us).numpy(), (25, 50, 75))
        error_us = torch.tensor((high_us - low_us) / 2, dtype=torch.float64)
        dist.all_reduce(error_us, op=dist.ReduceOp.MAX)
        self.name = f"monotonic clocks compared after {NUM_BARRIERS} barriers"
        self.offset_us, self.error_us = float(middle_us), float(error_us)


def _host() -> str:
    """Key of the clock; host names differ between emulated nodes of one host."""
    return BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()
