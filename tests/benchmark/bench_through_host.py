"""`gpu_check.py gloo` on CPU ranks whose tensors count as those of a device."""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from monta_megatron.cli import main
from monta_megatron.emulation import gloo_collectives
from monta_megatron.tools import joined_ranks

copied: Counter[str] = Counter()
through_host = gloo_collectives.through_host


def counted(collective: Callable[..., Any]) -> Callable[..., Any]:
    staged = through_host(collective)

    def count(*args: Any, **kwargs: Any) -> Any:
        copied[collective.__name__] += 1
        return staged(*args, **kwargs)

    count.__name__ = collective.__name__
    return count


def is_copied(tensor: torch.Tensor) -> bool:
    """Rows, probabilities, counts: every tensor but a scalar."""
    return tensor.dim() > 0


gloo_collectives._is_on_device = is_copied
gloo_collectives.through_host = counted
gloo_collectives.install_for_device()
joined_ranks.join = functools.partial(joined_ranks.join, transport="gloo")
status = main(["bench", *sys.argv[1:]])
if torch.distributed.get_rank() == 0:
    print("copied:", *sorted(copied), file=sys.stderr)
sys.exit(status)
