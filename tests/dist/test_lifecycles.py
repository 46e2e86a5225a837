"""Groups that are destroyed and made again, passes that are abandoned, and what else changes.

docs/limits.md says of each what it gives.
"""

import contextlib
import copy
import gc
import itertools
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import layers
import pytest
import torch
import torch.distributed as dist
from cuda_graphs import replay_cuda_graph_attributes
from equal import assert_equal
from free_ports import free_ports
from layers import (
    Case,
    assert_same_results,
    build_layer,
    build_pair,
    error_of,
    forward_backward,
    idle_optimizer,
    initialize,
    make_batch,
)
from pool import Pool, on_ranks
from reloadable import reloadable_groups
from test_auto import AUTO, PICKED

import monta_megatron
from monta_megatron.chains import CHAINS
from monta_megatron.common.torch_private import is_open
from monta_megatron.core import Choice

HIERARCHICAL = Case(chain="hierarchical_alltoall")
DESTROYED = (
    "moe_monta: the process groups that this model was built with were destroyed; build it again "
    "with those of now"
)
CANNOT = "cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object"


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


def compare_all(case: Case, made: dict[str, Any]) -> None:
    """The layers of `made`, by chain, against its first, which is stock's."""
    results = {name: forward_backward(case, layer) for name, layer in made.items()}
    for name in list(results)[1:]:
        exact_sums = replace(case, chain=name).exact_sums
        assert_same_results(results[name], results["stock"], exact_sums, name)


def pair_by_chain(case: Case) -> dict[str, Any]:
    """Stock's layer and ours, as `compare_all` takes them."""
    return dict(zip(("stock", case.chain), build_pair(case), strict=True))


def abandon(case: Case, layer: Any) -> None:
    """Begin a step that ends at the experts, on all ranks."""
    failing = mock.patch.object(layer.experts, "forward", side_effect=RuntimeError("abandoned"))
    with failing, pytest.raises(RuntimeError, match="abandoned"):
        forward_backward(case, layer)


@pytest.mark.old_end
@pytest.mark.parametrize(
    ("case", "ours_of_rank"),
    [
        # Two chains with a rail and a node each.
        (Case(), [4] * 4),
        # The first stage is dense.
        (Case(ep=2, pp=2, ranks_per_node=1), [0, 0, 4, 4]),
    ],
)
@on_ranks(4)
def test_groups_that_are_wrapped_destroyed_and_made_again(
    case: Case, ours_of_rank: list[int]
) -> None:
    """All chains against stock; the second time our groups are given up before."""
    from megatron.core import parallel_state

    with groups_of_its_own(case), reloadable_groups() as groups:
        initialize(case)
        made: dict[str, Any] = {}
        if parallel_state.get_pipeline_model_parallel_rank() == case.pp - 1:
            made["stock"] = build_layer(case, "alltoall")
            made |= {chain: build_layer(replace(case, chain=chain)) for chain in CHAINS}
        compare_all(case, made)
        for forgets in (False, True):
            if forgets:
                monta_megatron.forget_groups()
            groups.sleep()
            ours = [
                each.process_group
                for layer in list(made.values())[1:]
                for each in layer.token_dispatcher.groups.values()
                if each.name in ("rail", "node")
            ]
            assert sum(map(is_open, ours)) == (0 if forgets else ours_of_rank[dist.get_rank()])
            groups.wake()
            one = torch.ones(1)
            dist.all_reduce(one, group=dist.new_group(range(4)))
            assert one.item() == 4
            compare_all(case, made)


@pytest.mark.old_end
@pytest.mark.parametrize("chain", ["hierarchical_alltoall", "hierarchical_allgather"])
@on_ranks(4)
def test_our_groups_are_given_up_between_replays_of_the_preprocessing(chain: str) -> None:
    """A CUDA graph replays it without the Python that would make them again."""
    case = Case(chain=chain, num_chunks=2)
    assert replay_cuda_graph_attributes(case, forgets=True) == [f"{chain} in 2 chunks"] * 4


@on_ranks(4)
def test_another_layout() -> None:
    """A layer in each of two layouts; then the first without its groups."""
    from megatron.core import parallel_state

    first, second = HIERARCHICAL, Case(ep=2, etp=2, topk=3)
    with groups_of_its_own(first):
        others = list(parallel_state._global_process_group_list)
        before = pair_by_chain(first)
        compare_all(first, before)
        known = parallel_state._global_process_group_list
        parallel_state.destroy_model_parallel()
        after = pair_by_chain(second)
        compare_all(second, after)
        # Megatron forgets its groups and closes none.
        compare_all(first, before)
        for group in known:
            if group not in others and is_open(group):
                dist.destroy_process_group(group)
        compare_all(second, after)
        assert error_of(forward_backward, first, before[first.chain]) == DESTROYED


@on_ranks(4)
def test_a_chain_changes_after_an_abandoned_pass() -> None:
    """A pass is abandoned before a chain of other rows runs, either way."""
    stock_layer, layer = build_pair(PICKED)
    stock, chooser = forward_backward(PICKED, stock_layer), layer.token_dispatcher.chooser
    # From now on the step keeps its choice.
    forward_backward(PICKED, layer)
    choices = [None, *(Choice(chain=name, num_chunks=1) for name in ("alltoall", "allgather"))]
    # Before a choice is known, and after.
    for before, after in itertools.permutations(choices, 2):
        for choice, run in ((before, abandon), (after, forward_backward)):
            chooser.step_choice = choice
            result = run(PICKED, layer)
        assert after in (None, layer.token_dispatcher.choice)
        assert_same_results(result, stock, False, f"{before}, {after}")


@on_ranks(4)
def test_two_models_in_a_process() -> None:
    """Their passes are interleaved: forward, forward, backward, backward."""
    cases = [HIERARCHICAL, Case()]
    made = [build_layer(case) for case in cases]
    alone = [forward_backward(case, layer) for case, layer in zip(cases, made, strict=True)]
    batch = make_batch(HIERARCHICAL)
    hidden = [batch.tokens.unsqueeze(1).requires_grad_() for _ in made]
    outputs = [layer(rows)[0] for layer, rows in zip(made, hidden, strict=True)]
    for rows, output, expected in zip(hidden, outputs, alone, strict=True):
        assert_equal(output.detach().squeeze(1), expected.values["output"], "output")
        output.backward(batch.gradient.unsqueeze(1))
        assert_equal(rows.grad.squeeze(1), expected.values["input"], "input gradient")
    for case, layer, expected in zip(cases, made, alone, strict=True):
        assert_same_results(forward_backward(case, layer), expected, True, "after both")


@pytest.mark.parametrize("num_local_experts", [2, 4])
@on_ranks(4)
def test_a_model_that_is_built_again(num_local_experts: int) -> None:
    """Of the same shape, or of another, while rank 0 alone still holds the one before."""
    layer, optimizer = build_layer(AUTO), idle_optimizer()
    for _ in range(2):
        forward_backward(AUTO, layer)
        optimizer.step()
    held = [layer] * (dist.get_rank() == 0)
    del layer
    gc.collect()
    case = replace(AUTO, num_local_experts=num_local_experts)
    again = build_layer(case)
    stock = forward_backward(case, build_layer(case, "alltoall"))
    for _ in range(3):
        assert_same_results(forward_backward(case, again), stock, False, "built again")
        optimizer.step()
    del held


@pytest.mark.parametrize("dispatcher", ["alltoall", "monta"])
@on_ranks(4)
def test_copies_of_a_layer_are_refused_as_stocks_are(dispatcher: str) -> None:
    layer = build_layer(HIERARCHICAL, dispatcher)
    expected = forward_backward(HIERARCHICAL, layer)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=f"^{CANNOT}$"):
            copied(layer)
    # A checkpoint holds neither groups nor dispatcher.
    other = build_layer(HIERARCHICAL, dispatcher)
    other.load_state_dict(pickle.loads(pickle.dumps(layer.state_dict())))
    assert_same_results(forward_backward(HIERARCHICAL, other), expected, True, dispatcher)


@pytest.mark.parametrize("chain", ["alltoall_allgather", "hierarchical_alltoall"])
@on_ranks(4)
def test_a_graph_is_kept(chain: str) -> None:
    """Its backward pass runs twice, and gives the same twice."""
    layer = build_layer(Case(chain=chain))
    hidden = torch.randn(24, 1, 16).requires_grad_()
    output, _ = layer(hidden)
    loss, gradients = output.square().sum(), []
    for keeps in (True, False):
        hidden.grad = None
        loss.backward(retain_graph=keeps)
        gradients.append(hidden.grad)
    assert_equal(gradients[1], gradients[0], "input gradient")


@on_ranks(4)
def test_a_compiled_layer() -> None:
    layer = build_layer(HIERARCHICAL)
    expected = forward_backward(HIERARCHICAL, layer)
    layer.forward = torch.compile(layer.forward, backend="eager")
    assert_same_results(forward_backward(HIERARCHICAL, layer), expected, True, "compiled")
    torch.compiler.reset()


def restarted(case: Case, port: int) -> str:
    """A pass ends on one rank only; then torch.distributed and Megatron begin anew.

    Returns:
        what a layer from before says afterwards.
    """
    from megatron.core import parallel_state

    from monta_megatron.exchange.errors import ExchangeError

    layer, optimizer = build_layer(case), idle_optimizer()
    forward_backward(case, layer)
    # So that what was exchanged is being gathered when the pass ends.
    optimizer.step()
    if dist.get_rank() == 0:
        abandon(case, layer)
    else:
        with pytest.raises(ExchangeError):
            forward_backward(case, layer)
    dist.destroy_process_group()
    parallel_state.destroy_model_parallel()
    layers._parallel_states.clear()
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    made = pair_by_chain(case)
    for _ in range(3):
        compare_all(case, made)
        optimizer.step()
    return error_of(forward_backward, case, layer)


def test_a_process_begins_anew_after_an_abandoned_pass() -> None:
    case = replace(AUTO, ep=2, ranks_per_node=1)
    # So long a rank waits for the one that has left.
    with contextlib.closing(Pool(2, group_limit_s=5.0)) as pool:
        assert pool.run(restarted, case, free_ports(1)[0]) == [DESTROYED] * 2
