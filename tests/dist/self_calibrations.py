"""Functions that run on the ranks of a pool: dispatchers that calibrate themselves."""

import contextlib
import io
import os
import time
from unittest import mock

import torch
import torch.distributed as dist
from layers import Case, build_layer, initialize

from monta_megatron.common.rules import hash_of


def calibrated(case: Case, cache_of_rank: list[str]) -> tuple[int, list[str], float]:
    """Builds two layers in a process that has not calibrated.

    Args:
        case: the layer.
        cache_of_rank: the user's cache of each rank.

    Returns:
        a hash of the costs, what this rank prints, and the seconds it took.
    """
    from monta_megatron.integration import ranks, self_calibration

    initialize(case)
    ranks._reported.clear()
    self_calibration._found.clear()
    environment = {"XDG_CACHE_HOME": cache_of_rank[dist.get_rank()]}
    with (
        mock.patch.dict(os.environ, environment),
        # In a second or two on a busy machine, starts alone may be measured.
        mock.patch.object(self_calibration, "LEAST_GROWTH", 0),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        begin_s = time.monotonic()
        first = build_layer(case, "monta")
        elapsed_s = time.monotonic() - begin_s
        state = torch.get_rng_state()
        build_layer(case, "monta")
    # The training's random numbers are those of one that has not calibrated.
    assert torch.equal(torch.get_rng_state(), state)
    costs = first.token_dispatcher.chain_policy.cluster
    return hash_of({"costs": repr(costs)}), said.getvalue().splitlines(), elapsed_s


def calibrated_with_triton_on_some(case: Case, cache_of_rank: list[str]) -> int:
    """Likewise, where the last rank cannot import Triton; returns the hash."""
    from monta_megatron.exchange import counts, kernel_choice
    from monta_megatron.integration import policy

    has_triton = dist.get_rank() < dist.get_world_size() - 1
    problem = "" if has_triton else "Triton cannot be imported"
    with (
        mock.patch.object(kernel_choice, "kernel_problem", lambda *_: problem),
        # CPU ranks run PyTorch's operations all the same.
        mock.patch.object(policy, "is_fused", lambda *_: False),
        mock.patch.object(counts, "is_fused", lambda *_: False),
    ):
        return calibrated(case, cache_of_rank)[0]
