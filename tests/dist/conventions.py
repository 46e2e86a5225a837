"""Functions that run on the ranks of a pool: a dispatcher called as Megatron-LM's own tests do.

With probabilities of 1 / top-k, experts that scale their rows by them, and top-2, every sum is
exact: what was dispatched and combined comes back to the bit.
"""

import dataclasses
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from equal import assert_equal
from layers import HIDDEN, Case, assert_close, build_layer, forward_backward

from monta_megatron.chains import CHAINS
from monta_megatron.integration import first_use


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """How a dispatcher is called.

    Attributes:
        shape: of the hidden states, without the hidden size.
        dtype: of the hidden states.
        contiguous: whether values lie side by side; else every other one does.
        with_gradient: whether there is a graph.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    contiguous: bool = True
    with_gradient: bool = True

    def hidden_states(self) -> torch.Tensor:
        """Of this rank: [*shape, HIDDEN]."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        step = 1 if self.contiguous else 2
        made = torch.randn(*self.shape, step * HIDDEN, generator=generator)
        return made.to("cuda", getattr(torch, self.dtype))[..., ::step]


def round_trip(
    dispatcher: Any, hidden: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the rows of each expert, whose rows are scaled by their probabilities."""
    rows, row_probs = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
    rows, tokens_per_expert, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
    assert int(torch.as_tensor(tokens_per_expert).sum()) == len(rows) == len(row_probs)
    rows = (rows * row_probs.unsqueeze(-1)).to(hidden.dtype)
    combined = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
    return dispatcher.combine_postprocess(combined), torch.as_tensor(tokens_per_expert)


def layers_of(case: Case, num_chunks: int) -> dict[str, Any]:
    """Stock's layer and one for each chain that can run, each checked anew."""
    first_use._passed.clear()
    layers = {"stock alltoall": build_layer(case, "alltoall")}
    options = {"moe_monta_ranks_per_node": 2} | case.options
    plainest = dataclasses.replace(case, options=options | {"moe_monta_chain": "alltoall"})
    layout = build_layer(plainest, "monta").token_dispatcher.setup.layout
    pads = case.config.get("moe_pad_expert_input_to_capacity", False)
    for name, chain in CHAINS.items():
        if chain.incompatibility(layout) is None and not (pads and chain.rows == "tokens"):
            each = dataclasses.replace(case, options=options | {"moe_monta_chain": name})
            chunks = 1 if chain.serial else num_chunks
            layers[name] = build_layer(each, "monta", moe_monta_num_chunks=chunks)
    return layers


def restores(case: Case, call: Call, num_chunks: int = 2) -> list[str]:
    """Dispatch and combine restore input and gradient; the dispatchers that did.

    With a capacity each token comes back as often as it was not dropped.
    """
    layers = layers_of(case, num_chunks)
    for name, layer in layers.items():
        hidden = call.hidden_states().requires_grad_(call.with_gradient)
        with torch.set_grad_enabled(call.with_gradient):
            if hidden.numel():
                _, routing_map = layer.router(hidden.detach())
            else:
                # Megatron's router takes no empty batch of this kind.
                routing_map = torch.zeros(0, case.num_experts, dtype=torch.bool)
            probs = routing_map.float() / case.topk
            # Lists that lie transposed are taken, too.
            output, _ = round_trip(
                layer.token_dispatcher,
                hidden,
                probs.T.contiguous().T.requires_grad_(call.with_gradient),
                routing_map.T.contiguous().T,
            )
        shares = (probs.sum(dim=1) * case.etp).view(*call.shape, 1)
        expected = (hidden.detach() * shares).to(hidden.dtype)
        what = f"{name}, {case}, {call}"
        assert_equal(output.detach(), expected, f"{what}: output")
        assert output.requires_grad == call.with_gradient, what
        if call.with_gradient:
            torch.autograd.backward(output, hidden.detach())
            assert hidden.grad is not None
            assert_equal(hidden.grad, expected, f"{what}: gradient")
    return list(layers)


def pads_to_capacity(case: Case, call: Call) -> list[str]:
    """Padded experts give what experts that are not padded give; the dispatchers that did."""
    from megatron.core.transformer.moe.moe_utils import get_capacity

    num_tokens = call.hidden_states().view(-1, HIDDEN).shape[0]
    factor = case.config["moe_expert_capacity_factor"]
    capacity = get_capacity(num_tokens * case.topk, case.num_experts, factor)
    padded = case.config | {"moe_pad_expert_input_to_capacity": True}
    given = layers_of(case, 2)
    padding = layers_of(dataclasses.replace(case, config=padded), 2)
    for name in padding:
        results = []
        for layer in (given[name], padding[name]):
            hidden = call.hidden_states().requires_grad_()
            probs, routing_map = layer.router(hidden.detach())
            output, tokens_per_expert = round_trip(
                layer.token_dispatcher, hidden, probs.detach(), routing_map
            )
            torch.autograd.backward(output, output.detach())
            assert hidden.grad is not None
            results.append((output.detach(), hidden.grad))
        assert (tokens_per_expert == capacity * case.ep * case.etp).all(), name
        for mine, expected in zip(*reversed(results), strict=True):
            assert_close(mine, expected, False, f"{name}, padded to {capacity}")
    return list(padding)


def pads_for_quantization(case: Case, call: Call) -> list[str]:
    """With experts padded to 16 rows the results are the same; the dispatchers that did."""
    from megatron.core.transformer.moe import token_dispatcher

    layers = layers_of(case, 2)
    with mock.patch.object(token_dispatcher, "get_align_size_for_quantization", lambda _: 16):
        for name, layer in layers.items():
            outputs = []
            for pads in (False, True):
                layer.config.moe_router_padding_for_quantization = pads
                first_use._passed.clear()
                hidden = call.hidden_states()
                probs, routing_map = layer.router(hidden)
                output, tokens_per_expert = round_trip(
                    layer.token_dispatcher, hidden, probs, routing_map
                )
                outputs.append(output.detach())
            assert (tokens_per_expert % 16 == 0).all(), name
            assert_close(outputs[1], outputs[0], False, f"{name}, padded to 16")
    return list(layers)


def follows_the_map(case: Case, num_chunks: int, patched: bool) -> list[str]:
    """Every chain gives on a map what stock gives that counts rows by it; the chains.

    Frameworks replace stock's `preprocess` so where top-k does not say how many rows there are.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    original = MoEAlltoAllTokenDispatcher.preprocess

    def preprocess(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = original(self, routing_map)
        self.num_out_tokens = int(routing_map.sum())
        return result

    replaced = mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", preprocess)
    layers = layers_of(case, num_chunks)
    with replaced:
        stock = forward_backward(case, layers.pop("stock alltoall"))
    for name, layer in layers.items():
        if patched:
            replaced.start()
        ours = forward_backward(case, layer)
        if patched:
            replaced.stop()
            is_early = layer.token_dispatcher.cuda_sync_point == "before_permutation_1"
            assert is_early == (CHAINS[name].rows == "permuted tokens")
        what = f"{name} on {case.routing}"
        for field in ("expert_rows", "expert_probs", "tokens_per_expert"):
            assert_equal(getattr(ours, field), getattr(stock, field), f"{what}: {field}")
        exact = case.etp <= 2 and CHAINS[name].rows == "permuted tokens"
        sums = {"output": stock.output, "input_gradient": stock.input_gradient}
        for field, expected in sums.items():
            assert_close(getattr(ours, field), expected, exact, f"{what}: {field}")
        for weight, expected in stock.weight_gradients.items():
            assert_close(ours.weight_gradients[weight], expected, exact, f"{what}: {weight}")
    return list(layers)
