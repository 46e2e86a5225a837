"""Replay of a captured preprocess on the ranks of a pool, without a graph."""

from operator import attrgetter
from typing import Any

import torch
from equal import assert_equal
from layers import Case, build_layer, make_batch
from patches import capturing_preprocess

import monta_megatron
from monta_megatron.exchange.collectives import are_open


def after_preprocess(dispatcher: Any, rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """The five phases behind the first: the output."""

    def experts(rows: torch.Tensor, _: Any, probs: torch.Tensor) -> torch.Tensor:
        return (rows * probs[:, None]).to(rows.dtype)

    sent = dispatcher.token_dispatch(rows, probs)
    if dispatcher.computes:
        computed = dispatcher.compute(experts, *sent)
    else:
        at_experts = experts(*dispatcher.dispatch_postprocess(*sent))
        computed = dispatcher.combine_preprocess(at_experts)
    return dispatcher.combine_postprocess(dispatcher.token_combine(computed))


def replay_cuda_graph_attributes(case: Case, forgets: bool = False) -> list[str]:
    """Megatron replays a captured preprocess by setting the listed attributes: do that.

    Batch A is preprocessed and its attributes are kept; batch B is preprocessed after it; then
    A's attributes come back in every step, and the rest of the phases must belong to A. A name with
    dots is that of an attribute of the shared experts.

    Args:
        case: the layer.
        forgets: whether rail and node groups are closed before each replay, which runs no Python of
            the preprocessing.

    Returns:
        what ran in each step.
    """
    from monta_megatron.integration import auto

    auto._shared.clear()
    with capturing_preprocess():
        layer = build_layer(case)
    dispatcher, shared_experts = layer.token_dispatcher, layer.token_dispatcher.shared_experts
    # Overlapped shared experts refuse a second preprocess while the first is under way.
    idle = getattr(shared_experts, "_overlap_state", None)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def preprocess(step: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        if idle is not None:
            shared_experts._overlap_state = idle
        batch = make_batch(case, step)
        probs = batch.routing_map / torch.arange(1, case.num_experts + 1)
        rows = batch.tokens.unsqueeze(1)
        outputs = dispatcher.dispatch_preprocess(rows, batch.routing_map, probs)
        values = {name: attrgetter(name)(dispatcher) for name in dispatcher.cudagraph_attrs}
        return [each.detach().clone() for each in outputs], {
            name: each.clone() for name, each in values.items() if isinstance(each, torch.Tensor)
        }

    expected = after_preprocess(dispatcher, *preprocess(0)[0])
    (rows, probs), attributes = preprocess(0)
    preprocess(1)
    assert "joined_counts" in attributes
    assert shared_experts is None or "shared_experts.cached_fc1_input" in attributes
    seen = []
    # What shared experts have begun is there once.
    for _ in range(4 if shared_experts is None else 1):
        if forgets:
            monta_megatron.forget_groups()
        for name, kept in attributes.items():
            *path, last = name.split(".")
            value = kept.clone()
            setattr(attrgetter(path[0])(dispatcher) if path else dispatcher, last, value)
            if hasattr(dispatcher, "get_cudagraph_attr"):
                assert dispatcher.get_cudagraph_attr(name) is value
        output = after_preprocess(dispatcher, rows * weight, probs.clone())
        assert_equal(output.detach(), expected, "the replayed batch")
        assert are_open(dispatcher.groups)
        output.sum().backward()
        optimizer.step()
        seen.append(dispatcher.choice.name)
    return seen
