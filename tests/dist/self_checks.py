"""Functions that run on the ranks of a pool: the first use of a chain, checked against stock's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from equal import assert_equal
from layers import Case, build_layer, forced_routing, forward_backward, phases

from monta_megatron.integration import checks, dispatcher

FAULTY_RANK = 1


def errors_with(case: Case, function: str, num_passes: int = 1) -> list[str]:
    """The error of each pass of a layer if a rank's `dispatch` or `combine` is faulty, or ""."""
    original = getattr(dispatcher, function)
    is_faulty = dist.get_rank() == FAULTY_RANK
    checks._checked_chains.clear()
    layer, errors = build_layer(case, "monta"), []
    with mock.patch.object(dispatcher, function, faulty(original) if is_faulty else original):
        for _ in range(num_passes):
            errors.append("")
            try:
                forward_backward(case, layer)
            except checks.SelfCheckError as error:
                errors[-1] = str(error)
    return errors


def error_if_stock_fails(case: Case) -> str:
    """The error of a layer's first pass if stock's dispatcher fails on every rank."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    checks._checked_chains.clear()
    layer = build_layer(case, "monta")
    failure = RuntimeError("split sizes do not match")
    with mock.patch.object(MoEAlltoAllTokenDispatcher, "token_dispatch", side_effect=failure):
        try:
            forward_backward(case, layer)
        except checks.SelfCheckError as error:
            assert not checks._checked_chains
            return str(error)
    return ""


def check_all(case: Case, chains: list[tuple[str, int]]) -> int:
    """Check chains in the middle of a micro-batch of another one; how many were checked."""
    from monta_megatron.chains import CHAINS

    checks._checked_chains.clear()
    layer = build_layer(case, "monta")
    made = layer.token_dispatcher
    generator = torch.Generator().manual_seed(dist.get_rank())
    routing_map = forced_routing(case, case.num_tokens, generator)
    hidden = torch.randn(case.num_tokens, 16, generator=generator)
    assert routing_map is not None
    expected = phases(made, hidden, routing_map)
    bind = made._bind

    def checking(counts: Any) -> None:
        bind(counts)
        named = [(CHAINS[name], num_chunks) for name, num_chunks in chains]
        checks.check_chains(made, made._stock_dispatcher, named)

    made._bind = checking
    for mine, theirs in zip(phases(made, hidden, routing_map), expected, strict=True):
        assert_equal(mine, theirs, "the micro-batch under way")
    return len(checks._checked_chains)


def faulty(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but the last value of the last row is one too large."""

    def changed(*args: Any) -> Any:
        result = function(*args)
        rows = result if isinstance(result, torch.Tensor) else result[0]
        rows.view(-1)[-1] += 1
        return result

    return changed


def round_trips(case: Case, num_layers: int) -> int:
    """How many round trips, stock's among them, layers of a shape make in two passes."""
    checks._checked_chains.clear()
    layers = [build_layer(case, "monta") for _ in range(num_layers)]
    trip = checks.round_trip
    with mock.patch.object(checks, "round_trip", side_effect=trip) as counted:
        for layer in layers * 2:
            forward_backward(case, layer)
    return counted.call_count


def random_numbers_are_left_alone(case: Case) -> None:
    """A training that is checked draws the numbers of one that is not."""
    checks._checked_chains.clear()
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
    replaced = {
        "_difference": lambda *_: here,
        "_identity": lambda *_: "a GPU",
        "_checked_kernels": set(),
    }
    with mock.patch.multiple(checks, is_fused=lambda *_: True, **replaced):
        try:
            checks.check_kernels(dispatcher, torch.device("cuda"))
        except checks.SelfCheckError as error:
            return str(error)
    return ""
