"""Experts inside the pipeline (--moe-monta-overlap-experts), against stock's layer.

`test_dispatcher_properties` and `test_supported_settings` have layers of every chain with them,
`tests/megatron/test_tuning.py` trains.
"""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layers import (
    Case,
    assert_same_results,
    build_layer,
    build_pair,
    compare,
    error_of,
    forward_backward,
)
from patches import gradient_accumulation_fusion, recomputation_on_a_host
from pool import on_ranks
from test_supported_settings import SPLIT_CASES

from monta_megatron.integration.experts import check_experts

of_every_chain = pytest.mark.parametrize(
    "case", [replace(case, num_chunks=3) for case in SPLIT_CASES], ids=lambda case: case.chain
)
CASE = replace(SPLIT_CASES[-1], num_chunks=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@of_every_chain
@on_ranks(4)
def test_all_but_matrix_products_is_the_same_to_the_bit(case: Case, dtype: str) -> None:
    """Experts that compute each value by itself: split and whole, nothing differs at all."""
    case = replace(case, dtype=dtype, by_value=True)
    split, whole = (
        forward_backward(each, build_layer(each)) for each in (case, replace(case, num_chunks=1))
    )
    assert_same_results(split, whole, True, "split")


@on_ranks(4)
def test_rows_of_all_chunks_are_received() -> None:
    """What a rank says of its load with its next counts."""
    layer = build_layer(CASE)
    calls, _ = (forward_backward(CASE, layer).calls for _ in range(2))
    received = layer.token_dispatcher.received_rows[dist.get_rank()]
    assert len(calls) == 3 and received == sum(calls).sum() > calls[0].sum()


@pytest.mark.parametrize("frozen", ["experts", "router", "input", "router input"])
@of_every_chain
@on_ranks(4)
def test_frozen(case: Case, frozen: str) -> None:
    """Parts of a layer, or what it is given, without gradients: the others' are stock's."""
    results = []
    for layer in build_pair(case):
        for name in set(frozen.split()) - {"input"}:
            getattr(layer, name).requires_grad_(False)
        results.append(forward_backward(case, layer, with_input_gradient="input" not in frozen))
    stock, ours = results
    parts = {"experts", "router", "input"}
    found = {name.partition(".")[0] for name in ours.values}
    assert found & parts == parts - set(frozen.split())
    assert_same_results(ours, stock, False, f"frozen: {frozen}")


class GroupedLinear(torch.nn.Module):
    """Products of rows with a weight for each expert, as Transformer Engine's: on any device."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__()
        for expert in range(num_experts):
            weight = torch.nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
            self.register_parameter(f"weight{expert}", weight)

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: list[int]
    ) -> tuple[torch.Tensor, None]:
        parts = zip(rows.split(tokens_per_expert), self.parameters(), strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts]), None


@pytest.mark.old_end
@pytest.mark.parametrize(
    ("changes", "recomputes_activation"),
    [({}, False), ({}, True), ({"topk": 1, "config": {"moe_apply_probs_on_input": True}}, False)],
    ids=["", "recomputed", "probabilities on the input"],
)
@on_ranks(4)
def test_grouped_experts(changes: dict[str, Any], recomputes_activation: bool) -> None:
    """Megatron's grouped experts, which get rows per expert as stock gives them."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    linear = {"linear_fc1": GroupedLinear, "linear_fc2": GroupedLinear, "activation_func": None}
    case, results = replace(CASE, **changes), []
    for layer in build_pair(case):
        torch.manual_seed(dist.get_rank())
        layer.experts = TEGroupedMLP(
            layer.num_local_experts,
            layer.config,
            SimpleNamespace(**linear),
            pg_collection=get_default_pg_collection(),
        ).to("cuda", layer.config.params_dtype)
        layer.experts.activation_recompute = recomputes_activation
        with recomputation_on_a_host():
            results.append(forward_backward(case, layer))
    stock, ours = results
    assert_same_results(ours, stock, False, "grouped experts")
    (theirs,), mine = stock.calls, ours.calls
    assert len(mine) == 3 and torch.equal(sum(mine), theirs)
    for each in mine:
        assert (each.dtype, each.device, each.shape) == (theirs.dtype, theirs.device, theirs.shape)


@of_every_chain
@on_ranks(4)
def test_the_norm_before_it_is_recomputed(case: Case) -> None:
    """What a layer reads is discarded and computed anew, as Megatron's norm before it may be."""
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    layer = build_layer(case)
    whole = layer.forward

    def recomputed(hidden: torch.Tensor) -> Any:
        checkpoint = CheckpointWithoutOutput()
        output, _ = whole(checkpoint.checkpoint(torch.tanh, hidden))
        checkpoint.discard_output_and_register_recompute(output)
        return output, None

    results = []
    for forward in (lambda hidden: whole(hidden.tanh()), recomputed):
        layer.forward = forward
        with recomputation_on_a_host():
            results.append(forward_backward(case, layer))
    assert_same_results(*results, True, "its input recomputed")


@on_ranks(4)
def test_state_dict() -> None:
    """Once it has run, that of a layer without the pipeline."""
    keys = []
    for layer in build_pair(CASE):
        forward_backward(CASE, layer)
        keys.append((list(layer.state_dict()), list(layer.sharded_state_dict())))
    assert keys[0] == keys[1]


@on_ranks(4)
def test_products_of_all_chunks_add_to_one_gradient() -> None:
    """With gradient accumulation fusion a weight gets one placeholder, as without chunks."""
    case, gradients = replace(CASE, config={"gradient_accumulation_fusion": True}), []
    for num_chunks in (3, 1):
        with gradient_accumulation_fusion() as placeholders:
            layer = build_layer(replace(case, num_chunks=num_chunks))
            weights = list(layer.experts.parameters())
            for weight in weights:
                weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
            forward_backward(case, layer)
        assert placeholders == Counter(tuple(weight.shape) for weight in weights)
        assert all(weight.grad_added_to_main_grad for weight in weights)
        gradients.append([weight.main_grad for weight in weights])
    for split, whole in zip(*gradients, strict=True):
        # Sums of a few products in another order.
        assert (split - whole).abs().max() < 1e-6 * whole.abs().max()


@pytest.mark.parametrize("num_chunks", [None, 3])
@on_ranks(4)
def test_auto_splits_the_best_chain_of_tokens(num_chunks: int | None) -> None:
    """In 4, or as asked for; on every rank alike, with other tokens in every step."""
    options = {"cluster": "emulated_2x4_500mbit", "tune_steps": 0}
    case = Case(chain="auto", pipelined=True, options=options, num_chunks=num_chunks)
    for choice in compare(replace(case, tokens=(2000, 0, 1, 100, 1, 1, 0, 1), num_steps=5)):
        assert choice.splits_experts and choice.num_chunks == (num_chunks or 4)


@on_ranks(4)
def test_fsdp_that_no_configuration_names_is_refused() -> None:
    """A layer whose weights Megatron-FSDP has taken over."""
    layer = build_layer(CASE)
    for parameter in layer.experts.parameters():
        parameter.__fsdp_param__ = True
    refused = error_of(forward_backward, CASE, layer)
    assert refused.startswith("use_megatron_fsdp: not supported with moe_monta_overlap_experts")


def test_dropout_inside_experts_is_refused() -> None:
    experts = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
    check_experts(experts)
    experts.append(torch.nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"experts\.2: dropout of 0.1, must be 0 with"):
        check_experts(experts)
