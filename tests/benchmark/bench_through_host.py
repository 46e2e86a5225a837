"""`gpu_check.py gloo` on CPU ranks whose tensors count as those of a device.

The exchange is compared with that of the dispatchers, too.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import gpu_check

from monta_megatron.cli import main
from monta_megatron.core import Layout
from monta_megatron.exchange import collectives
from monta_megatron.tools.bench import measure

num_copied = 0
differences_from_stock = measure.differences_from_stock


def is_copied(tensor: torch.Tensor) -> bool:
    """Rows, probabilities, counts: every tensor but a scalar."""
    global num_copied
    num_copied += tensor.dim() > 0
    return tensor.dim() > 0


def differences(candidates: Any, layout: Layout) -> list[str]:
    assert layout == candidates[-1].dispatcher.setup.layout
    return differences_from_stock(candidates, layout)


gpu_check.is_on_device = is_copied
gpu_check.send_through_host()
collectives.join_launch = functools.partial(collectives.join_launch, transport="gloo")
measure.differences_from_stock = differences
status = main(["bench", *sys.argv[1:]])
if torch.distributed.get_rank() == 0:
    print("copied:", num_copied, file=sys.stderr)
sys.exit(status)
