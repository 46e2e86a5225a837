"""The priced collectives of stock's `allgather` are those that Megatron's dispatcher calls."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

import torch
from fake_world import LAYOUTS, TOPK, megatron_groups, routing_map
from megatron.core import parallel_state
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from monta_megatron.chains.program import FORWARD_BACKWARD
from monta_megatron.core import Shape
from monta_megatron.planner.routing import UniformRouting
from monta_megatron.planner.stock import allgather_steps
from monta_megatron.tools.stock_collectives import StockCollective, observed

LAYOUT = LAYOUTS[16, 1]
NUM_TOKENS, HIDDEN = 48, 32
pytestmark = pytest.mark.usefixtures("world")


def stock_dispatcher() -> MoEAllGatherTokenDispatcher:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=LAYOUT.num_experts,
        moe_router_topk=TOPK,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=LAYOUT.ep,
        add_bias_linear=False,
    )
    groups = megatron_groups(LAYOUT)
    collection = SimpleNamespace(ep=groups["ep"], expt_tp=groups["etp"], tp_ep=groups["tp_ep"])
    first, number = LAYOUT.first_expert, LAYOUT.num_local_experts
    return MoEAllGatherTokenDispatcher(
        number, list(range(first, first + number)), config, collection
    )


def called_by_stock(prob_dtype: torch.dtype) -> list[StockCollective]:
    """The collectives of one layer, forward and backward, in order."""
    called: list[StockCollective] = []

    def observe(collective: StockCollective, run: Callable[[], Any]) -> Any:
        called.append(collective)
        return run()

    dispatcher, routed = stock_dispatcher(), routing_map(NUM_TOKENS, LAYOUT.num_experts)
    hidden_states = torch.randn(NUM_TOKENS, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(NUM_TOKENS, LAYOUT.num_experts, dtype=prob_dtype, requires_grad=True)
    with (
        observed(LAYOUT.nodes, observe),
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
    ):
        columns = dispatcher.token_dispatch(
            *dispatcher.dispatch_preprocess(hidden_states, routed, probs)
        )
        # The fake group gathers nothing: this rank's map stands for those of all.
        dispatcher.routing_map = routed.repeat(len(LAYOUT.nodes), 1)
        rows, _, row_probs = dispatcher.dispatch_postprocess(*columns)
        outputs = dispatcher.combine_preprocess(rows * row_probs[:, None].to(rows.dtype))
        output = dispatcher.combine_postprocess(dispatcher.token_combine(outputs))
        output.sum().backward()
    return called


@pytest.mark.parametrize("prob_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_collectives_of_stock_allgather(
    prob_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", None)
    parallel_state._set_global_memory_buffer()
    shape = Shape(
        layout=LAYOUT,
        hidden_size=HIDDEN,
        value_bytes=2,
        prob_bytes=prob_dtype.itemsize,
        routing=UniformRouting(num_experts=LAYOUT.num_experts, topk=TOPK),
        tokens_per_rank=NUM_TOKENS,
    )
    priced = [
        step.traffic
        for pass_ in FORWARD_BACKWARD
        for step in allgather_steps(shape, pass_)
        if step.traffic.operation == "allgather"
    ]
    called = called_by_stock(prob_dtype)
    # Which of its two gradients comes first is autograd's choice.
    by_bytes = [
        sorted(sent["inter"] for sent in part)
        for part in (
            [collective.sent_bytes for collective in called[5:]],
            [{"inter": traffic.sent_bytes("inter", [1])} for traffic in priced[5:]],
        )
    ]
    assert by_bytes[0] == by_bytes[1]
    assert [
        (collective.resource, collective.sent_bytes["inter"], collective.sent_bytes["intra"])
        for collective in called[:5]
    ] == [
        (traffic.resource, traffic.sent_bytes("inter", [1]), traffic.sent_bytes("intra", [1]))
        for traffic in priced[:5]
    ]
    assert [collective.name for collective in called] == [
        *["allgather"] * 3,
        "reduce_scatter",
        "allgather",
        *["reduce_scatter"] * 2,
    ]
