"""`monta bench` with a planted fault: two rows change places on their way to the experts."""

import sys
from typing import Any

import torch

from monta_megatron.cli import main
from monta_megatron.integration.dispatcher import MontaTokenDispatcher

dispatch_postprocess = MontaTokenDispatcher.dispatch_postprocess


def swapped(self: Any, rows: torch.Tensor, row_probs: torch.Tensor) -> Any:
    if torch.distributed.get_rank() == 1:
        rows = torch.cat([rows[1:2], rows[:1], rows[2:]])
    return dispatch_postprocess(self, rows, row_probs)


MontaTokenDispatcher.dispatch_postprocess = swapped
sys.exit(main(["bench", *sys.argv[1:]]))
