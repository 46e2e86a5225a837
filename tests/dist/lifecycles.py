"""Functions that run on the ranks of a pool: layers whose groups, passes or processes change.

Every function takes plain data and returns plain data.
"""

import contextlib
import copy
import dataclasses
import gc
import itertools
import os
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import layers
import torch
import torch.distributed as dist
from equal import assert_equal
from layers import (
    Case,
    assert_same_results,
    build_layer,
    error_of,
    forward_backward,
    initialize,
)
from reloadable import reloadable_groups

import monta_megatron
from monta_megatron.chains import CHAINS
from monta_megatron.core import Choice


@contextlib.contextmanager
def groups_of_its_own(case: Case) -> Iterator[None]:
    """Let Megatron make the groups of a layout that no other test uses."""
    from megatron.core import parallel_state

    initialize(case)
    before = dict(vars(parallel_state))
    none = {None: layers._parallel_states[None]}
    try:
        with mock.patch.object(layers, "_parallel_states", none):
            yield
    finally:
        vars(parallel_state).update(before)


def with_chain(case: Case, chain: str) -> Case:
    return dataclasses.replace(case, options={**case.options, "moe_monta_chain": chain})


def sum_over_all() -> float:
    """One from each rank, over a group that is made now."""
    one = torch.ones(1)
    dist.all_reduce(one, group=dist.new_group(range(dist.get_world_size())))
    return one.item()


def sleep_and_wake(case: Case, forgets: list[bool]) -> list[tuple[float, int]]:
    """All chains against stock, before Megatron's groups are destroyed and after they are made.

    With pipeline stages only the last one has MoE layers.

    Args:
        case: the layer.
        forgets: for each time that the groups are destroyed, whether ours are given up as well.

    Returns:
        for each time the sum over a group of all ranks, and the groups of ours that slept.
    """
    from megatron.core import parallel_state

    from monta_megatron.common.torch_private import is_open

    found = []
    with groups_of_its_own(case), reloadable_groups() as groups:
        initialize(case)
        made: dict[str, Any] = {}
        if parallel_state.get_pipeline_model_parallel_rank() == case.pp - 1:
            made["stock"] = build_layer(case, "alltoall")
            made |= {chain: build_layer(with_chain(case, chain), "monta") for chain in CHAINS}
        compare_all(case, made)
        for forget in forgets:
            if forget:
                monta_megatron.forget_groups()
            groups.sleep()
            ours = [
                each.process_group
                for layer in list(made.values())[1:]
                for each in layer.token_dispatcher.groups.values()
                if each.name in ("rail", "node")
            ]
            num_open = sum(map(is_open, ours))
            groups.wake()
            found.append((sum_over_all(), num_open))
            compare_all(case, made)
    return found


def compare_all(case: Case, made: dict[str, Any]) -> None:
    """The layers of `made` against its first, which is stock's."""
    results = {name: forward_backward(case, layer) for name, layer in made.items()}
    for name in list(results)[1:]:
        exact_sums = with_chain(case, name).exact_sums
        assert_same_results(results[name], results["stock"], exact_sums, name)


def another_layout(first: Case, second: Case) -> str:
    """A layer in each of two layouts; then what the first says without its groups."""
    from megatron.core import parallel_state

    from monta_megatron.common.torch_private import is_open

    with groups_of_its_own(first):
        others = list(parallel_state._global_process_group_list)
        before = {"stock": build_layer(first, "alltoall"), "ours": build_layer(first, "monta")}
        compare_all(first, before)
        known = parallel_state._global_process_group_list
        parallel_state.destroy_model_parallel()
        after = {"stock": build_layer(second, "alltoall"), "ours": build_layer(second, "monta")}
        compare_all(second, after)
        # Megatron forgets its groups and closes none.
        compare_all(first, before)
        for group in known:
            if group not in others and is_open(group):
                dist.destroy_process_group(group)
        compare_all(second, after)
        return error_of(forward_backward, first, before["ours"])


def abandon(case: Case, layer: Any) -> None:
    """Begin a step that ends at the experts, on all ranks."""
    failing = mock.patch.object(layer.experts, "forward", side_effect=RuntimeError("abandoned"))
    with failing, contextlib.suppress(RuntimeError):
        forward_backward(case, layer)
        raise AssertionError("the experts fail")


def step_of(layer: Any) -> None:
    """End an iteration without changing a weight."""
    torch.optim.SGD(layer.parameters(), lr=0.0).step()


def abandon_and_change(case: Case) -> None:
    """A pass is abandoned before a chain of other rows runs, either way."""
    stock = forward_backward(case, build_layer(case, "alltoall"))
    layer = build_layer(case, "monta")
    chooser = layer.token_dispatcher.chooser
    by_rows = {
        chain.rows: Choice(chain=chain.name, num_chunks=1)
        for chain in layer.token_dispatcher.setup.planner.chains
    }
    assert sorted(by_rows) == ["permuted tokens", "tokens"]
    # Before a choice is known, and after.
    for before, after in itertools.permutations([None, *by_rows.values()], 2):
        for choice, run in ((before, abandon), (after, forward_backward)):
            chooser.choice = choice
            result = run(case, layer)
        assert_same_results(result, stock, False, f"{before}, {after}")


def two_models(case: Case, chains: list[str]) -> None:
    """Two models whose passes are interleaved: forward, forward, backward, backward."""
    stock = forward_backward(case, build_layer(case, "alltoall"))
    models = [build_layer(with_chain(case, chain), "monta") for chain in chains]
    hidden = [torch.randn(case.num_tokens, 1, case.hidden).requires_grad_() for _ in models]
    alone = []
    for model, rows in zip(models, hidden, strict=True):
        forward_backward(case, model)
        model.zero_grad()
        output, _ = model(rows)
        output.square().sum().backward()
        alone.append((output.detach(), rows.grad))
        rows.grad = None
    outputs = [model(rows)[0] for model, rows in zip(models, hidden, strict=True)]
    for output in outputs:
        output.square().sum().backward()
    for model, rows, output, (expected, gradient) in zip(
        models, hidden, outputs, alone, strict=True
    ):
        assert_equal(output.detach(), expected, "output")
        assert_equal(rows.grad, gradient, "input gradient")
        again = forward_backward(case, model)
        assert_same_results(again, stock, False, "after both")


def built_again(case: Case) -> None:
    """A model is built anew while rank 0 alone still holds the one before."""
    layer = build_layer(case, "monta")
    for _ in range(2):
        forward_backward(case, layer)
        step_of(layer)
    held = [layer] * (dist.get_rank() == 0)
    del layer
    gc.collect()
    again = build_layer(case, "monta")
    stock = forward_backward(case, build_layer(case, "alltoall"))
    assert_same_results(forward_backward(case, again), stock, False, "built again")
    del held


def copies(case: Case) -> list[list[str]]:
    """What deep copies and pickles of stock's layer and of ours end with."""
    found = []
    for dispatcher in ("alltoall", "monta"):
        layer = build_layer(case, dispatcher)
        forward_backward(case, layer)
        errors = []
        for copied in (copy.deepcopy, pickle.dumps):
            try:
                copied(layer)
            except TypeError as error:
                errors.append(str(error))
        found.append(errors)
        # A checkpoint holds neither groups nor dispatcher.
        other = build_layer(case, dispatcher)
        other.load_state_dict(pickle.loads(pickle.dumps(layer.state_dict())))
        assert_same_results(
            forward_backward(case, other), forward_backward(case, layer), True, dispatcher
        )
    return found


def retained(case: Case) -> None:
    """The backward pass of a graph that is kept runs twice, and gives the same twice."""
    layer = build_layer(case, "monta")
    hidden = torch.randn(case.num_tokens, 1, case.hidden).requires_grad_()
    output, _ = layer(hidden)
    loss, gradients = output.square().sum(), []
    for keeps in (True, False):
        hidden.grad = None
        loss.backward(retain_graph=keeps)
        gradients.append(hidden.grad)
    assert_equal(gradients[1], gradients[0], "input gradient")


def compiled(case: Case) -> None:
    """A layer inside torch.compile gives what it gives outside."""
    layer = build_layer(case, "monta")
    expected = forward_backward(case, layer)
    outside = layer.forward
    layer.forward = torch.compile(outside, backend="eager")
    result = forward_backward(case, layer)
    assert_same_results(result, expected, True, "compiled")
    torch.compiler.reset()


def restarted(case: Case, port: int) -> str:
    """A pass ends on one rank only; then torch.distributed and Megatron begin anew.

    Returns:
        what a layer from before says afterwards.
    """
    from megatron.core import parallel_state

    from monta_megatron.exchange.errors import ExchangeError

    layer = build_layer(case, "monta")
    forward_backward(case, layer)
    # So that what was exchanged is being gathered when the pass ends.
    step_of(layer)
    if dist.get_rank() == 0:
        abandon(case, layer)
    else:
        with contextlib.suppress(ExchangeError):
            forward_backward(case, layer)
            raise AssertionError("rank 0 has left")
    dist.destroy_process_group()
    parallel_state.destroy_model_parallel()
    layers._parallel_states.clear()
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    made = {"stock": build_layer(case, "alltoall"), "ours": build_layer(case, "monta")}
    for _ in range(3):
        compare_all(case, made)
        step_of(made["ours"])
    return error_of(forward_backward, case, layer)


def moved(case: Case, placements: list[str]) -> list[tuple[int, ...]]:
    """A layer for each placement of the ranks on nodes, one letter for each rank's."""
    stock = forward_backward(case, build_layer(case, "alltoall"))
    found = []
    for placement in placements:
        with mock.patch.dict(os.environ, {"MONTA_NODE": placement[dist.get_rank()]}):
            layer = build_layer(case, "monta")
        result = forward_backward(case, layer)
        assert_same_results(result, stock, case.exact_sums, placement)
        found.append(layer.token_dispatcher.setup.layout.nodes)
    return found
