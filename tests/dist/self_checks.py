"""Functions that run on the ranks of a pool: the first use of a chain, checked against stock's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from layers import Case, build_layer, forward_backward

from monta_megatron.integration import kernel_check, self_check

FAULTY_RANK = 1


def error_with(case: Case, function: str) -> str:
    """The error of a layer's first pass if a rank's `dispatch` or `combine` is faulty, or ""."""
    original = getattr(self_check, function)
    is_faulty = dist.get_rank() == FAULTY_RANK
    self_check._checked.clear()
    with mock.patch.object(self_check, function, faulty(original) if is_faulty else original):
        try:
            forward_backward(case, build_layer(case, "monta"))
        except self_check.SelfCheckError as error:
            return str(error)
    return ""


def faulty(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but the last value of the last row is one too large."""

    def changed(*args: Any) -> Any:
        result = function(*args)
        rows = result if isinstance(result, torch.Tensor) else result[0]
        rows.view(-1)[-1] += 1
        return result

    return changed


def round_trips(case: Case, num_layers: int) -> int:
    """How many round trips two layers of a shape make in two passes."""
    self_check._checked.clear()
    layers = [build_layer(case, "monta") for _ in range(num_layers)]
    trip = self_check._our_round_trip
    with mock.patch.object(self_check, "_our_round_trip", side_effect=trip) as counted:
        for layer in layers * 2:
            forward_backward(case, layer)
    return counted.call_count


def random_numbers_are_left_alone(case: Case) -> None:
    """A training that is checked draws the numbers of one that is not."""
    self_check._checked.clear()
    layer = build_layer(case, "monta")
    before = torch.get_rng_state()
    forward_backward(case, layer)
    assert torch.equal(torch.get_rng_state(), before)


def kernel_error(difference: str) -> str:
    """The error of a check of kernels that differ on one rank, or ""."""
    dispatcher = SimpleNamespace(
        tp_ep_group=dist.group.WORLD,
        hidden_shape=(3, 1, 64),
        config=SimpleNamespace(params_dtype=torch.bfloat16),
        options=SimpleNamespace(kernels="auto"),
    )
    here = difference if dist.get_rank() == FAULTY_RANK else ""
    replaced = {"_difference": lambda *_: here, "_identity": lambda *_: "a GPU", "_checked": set()}
    with mock.patch.multiple(kernel_check, is_fused=lambda *_: True, **replaced):
        try:
            kernel_check.check_kernels(dispatcher, torch.device("cuda"))
        except self_check.SelfCheckError as error:
            return str(error)
    return ""
