"""`gpu_check.py gloo` on CPU ranks whose tensors count as those of a device."""

import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import gpu_check

from monta_megatron.cli import main
from monta_megatron.exchange import collectives

num_copied = 0


def is_copied(tensor: torch.Tensor) -> bool:
    """Rows, probabilities, counts: every tensor but a scalar."""
    global num_copied
    num_copied += tensor.dim() > 0
    return tensor.dim() > 0


gpu_check.is_on_device = is_copied
gpu_check.send_through_host()
collectives.join_launch = functools.partial(collectives.join_launch, transport="gloo")
status = main(["bench", *sys.argv[1:]])
if torch.distributed.get_rank() == 0:
    print("copied:", num_copied, file=sys.stderr)
sys.exit(status)
