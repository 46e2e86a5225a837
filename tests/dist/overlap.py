"""Functions that run on the ranks of a pool: layers with their experts in the pipeline."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from equal import assert_equal
from layers import (
    HIDDEN,
    Case,
    assert_same_results,
    build_layer,
    build_pair,
    error_of,
    force,
    forced_routing,
    forward_backward,
    make_batch,
    phases,
    seeded_by_rank,
)


def compare_frozen(case: Case, num_chunks: int, frozen: list[str]) -> None:
    """Parts of a layer, or what it is given, without gradients: the others' are stock's."""
    results = []
    for layer in build_pair(case, num_chunks):
        for name in set(frozen) - {"input"}:
            getattr(layer, name).requires_grad_(False)
        results.append(forward_backward(case, layer, "input" not in frozen))
    stock, ours = results
    trained = {"experts", "router"} - set(frozen)
    assert {name.partition(".")[0] for name in ours.weight_gradients} == trained
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
        parts = rows.split(tokens_per_expert)
        products = [
            part @ weight.t() for part, weight in zip(parts, self.parameters(), strict=True)
        ]
        return torch.cat(products), None


def with_grouped_experts(layer: Any, recomputes_activation: bool) -> list[torch.Tensor]:
    """Give a layer Megatron's grouped experts; their `tokens_per_expert`, call by call."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    submodules = SimpleNamespace(
        linear_fc1=GroupedLinear, linear_fc2=GroupedLinear, activation_func=None
    )
    torch.manual_seed(dist.get_rank())
    layer.experts = TEGroupedMLP(
        layer.num_local_experts,
        layer.config,
        submodules,
        pg_collection=get_default_pg_collection(),
    ).to("cuda", layer.config.params_dtype)
    layer.experts.activation_recompute = recomputes_activation
    counts: list[torch.Tensor] = []
    layer.experts.register_forward_pre_hook(lambda _, args: counts.append(args[1].clone()))
    return counts


def compare_grouped(case: Case, num_chunks: int, recomputes_activation: bool = False) -> None:
    """Megatron's grouped experts, which get rows per expert as stock gives them."""
    results, counts = [], []
    for layer in build_pair(case, num_chunks):
        counts.append(with_grouped_experts(layer, recomputes_activation))
        with recomputation_on_a_host():
            results.append(forward_backward(case, layer))
    stock, ours = results
    assert_same_results(ours, stock, False, "grouped experts")
    (theirs,), mine = counts
    assert len(mine) == num_chunks and torch.equal(sum(mine), theirs)
    for each in mine:
        assert (each.dtype, each.device, each.shape) == (theirs.dtype, theirs.device, theirs.shape)


@contextlib.contextmanager
def recomputation_on_a_host() -> Iterator[None]:
    """Let Megatron recompute single modules without Transformer Engine and a C++ compiler."""
    from megatron.core.tensor_parallel import random

    def share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
        storage = recomputed.untyped_storage()
        output.untyped_storage().resize_(storage.nbytes())
        output.untyped_storage().copy_(storage)

    with mock.patch.multiple(
        random,
        create=True,
        FP8GlobalStateManager=SimpleNamespace(is_fp8_enabled=lambda: False),
        activation_recompute_forward=lambda **_: contextlib.nullcontext(),
        fp8_autocast=lambda **_: contextlib.nullcontext(),
        _get_share_storage=lambda: share_storage,
    ):
        yield


def compare_recomputed_input(case: Case, num_chunks: int) -> None:
    """What a layer reads is discarded and computed anew, as Megatron's norm before it may be."""
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    results = []
    for is_recomputed in (False, True):
        layer = build_layer(case, "monta", moe_monta_num_chunks=num_chunks)
        whole = layer.forward

        def forward(hidden: torch.Tensor, whole: Any = whole, again: bool = is_recomputed) -> Any:
            if not again:
                return whole(hidden.tanh())
            checkpoint = CheckpointWithoutOutput()
            output, _ = whole(checkpoint.checkpoint(torch.tanh, hidden))
            checkpoint.discard_output_and_register_recompute(output)
            return output, None

        layer.forward = forward
        with recomputation_on_a_host():
            results.append(forward_backward(case, layer))
    plain, recomputed = results
    assert_same_results(recomputed, plain, True, "its input recomputed")


def state_dict_keys(case: Case) -> bool:
    """Whether a layer's state dicts are those of a layer without the pipeline, once it has run."""
    layers = [build_layer(case, dispatcher) for dispatcher in ("alltoall", "monta")]
    for layer in layers:
        forward_backward(case, layer)
    stock, ours = ((list(layer.state_dict()), list(layer.sharded_state_dict())) for layer in layers)
    return stock == ours


@dataclasses.dataclass
class FusedProducts:
    """PyTorch's operations in place of the CUDA kernel of gradient accumulation fusion.

    Attributes:
        dtypes: of rows and of `main_grad`, for every product.
        placeholders: shapes of what products returned in place of gradients.
    """

    dtypes: list[tuple[torch.dtype, torch.dtype]] = dataclasses.field(default_factory=list)
    placeholders: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    def add(self, rows: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        self.dtypes.append((rows.dtype, main_grad.dtype))
        main_grad.addmm_(gradient.to(main_grad.dtype).t(), rows.to(main_grad.dtype))

    def placeholder(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        self.placeholders.append(tuple(shape))
        return torch.empty(shape, dtype=dtype)


@contextlib.contextmanager
def gradient_accumulation_fusion() -> Iterator[FusedProducts]:
    """Let Megatron's linear layers add to `main_grad` themselves."""
    from megatron.core.tensor_parallel import layers

    products = FusedProducts()
    with mock.patch.multiple(
        layers,
        create=True,
        HAVE_TE=True,
        get_dummy_wgrad=products.placeholder,
        _grad_accum_fusion_available=True,
        fused_weight_gradient_mlp_cuda=SimpleNamespace(wgrad_gemm_accum_fp32=products.add),
    ):
        yield products


class Model:
    """A layer in Megatron's DDP, reducing gradients while others are computed; hooks are counted.

    Attributes:
        layer: the layer.
        ddp: the same in DDP.
        numbers_of_calls: calls of a parameter's hook in a micro-batch -> how often.
    """

    def __init__(self, case: Case, num_chunks: int) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )

        self.layer = build_layer(case, "monta", moe_monta_num_chunks=num_chunks)
        self._chooser = self.layer.token_dispatcher.chooser
        self.ddp = DistributedDataParallel(
            self.layer.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
            ),
            self.layer,
        )
        self._case, self._calls = case, Counter[str]()
        self._accumulators = []
        for name, parameter in self.layer.named_parameters():
            (accumulator,) = [parameter.expand_as(parameter).grad_fn.next_functions[0][0]]
            accumulator.register_hook(lambda *_, name=name: self._calls.update([name]))
            self._accumulators.append(accumulator)
        self.numbers_of_calls: Counter[int] = Counter()
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def accumulate(self, num_chunks: int, num_micro_batches: int) -> None:
        """Accumulate the gradients of some micro-batches in so many chunks, and reduce them."""
        self._chooser.step_choice = dataclasses.replace(
            self._chooser.step_choice, num_chunks=num_chunks, splits_experts=num_chunks > 1
        )
        self.ddp.zero_grad_buffer()
        for micro_batch in range(num_micro_batches):
            is_last = micro_batch == num_micro_batches - 1
            with contextlib.nullcontext() if is_last else self.ddp.no_sync():
                self._step()
            assert self.layer.token_dispatcher.choice.num_chunks == num_chunks
        self.ddp.finish_grad_sync()

    def _step(self) -> None:
        case, generator = self._case, self._generator
        force(self.layer.router, forced_routing(case, case.num_tokens, generator))
        hidden, target = (
            torch.randn(case.num_tokens, 1, HIDDEN, generator=generator).to(
                "cuda", getattr(torch, case.dtype)
            )
            for _ in range(2)
        )
        self._calls.clear()
        output, _ = self.ddp(hidden)
        (output - target).float().square().mean().backward()
        self.numbers_of_calls.update(self._calls[name] for name, _ in self.layer.named_parameters())


def train(
    case: Case, chunks_of_step: list[int], num_micro_batches: int
) -> tuple[dict[str, torch.Tensor], Counter[int]]:
    """Steps of the distributed optimizer over data-parallel ranks.

    Args:
        case: the layer.
        chunks_of_step: numbers of chunks of each step.
        num_micro_batches: whose gradients are accumulated in a step.

    Returns:
        the layer's parameters, and calls of a parameter's hook in a micro-batch -> how often.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = Model(case, max(chunks_of_step))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, use_distributed_optimizer=True, params_dtype=torch.float32
        ),
        [model.ddp],
    )
    for num_chunks in chunks_of_step:
        optimizer.zero_grad()
        model.accumulate(num_chunks, num_micro_batches)
        optimizer.step()
    parameters = {name: each.detach().clone() for name, each in model.layer.named_parameters()}
    return parameters, model.numbers_of_calls


def compare_main_gradients(case: Case, num_chunks: int) -> float:
    """The largest difference of a gradient in fp32 that the products of all chunks have added to.

    Returns:
        it, in units of the largest gradient of the weight.
    """
    gradients = []
    for chunks in (num_chunks, 1):
        with gradient_accumulation_fusion() as products:
            model = Model(case, chunks)
            model.accumulate(chunks, 2)
        assert model.numbers_of_calls.keys() == {1}
        weights = list(model.layer.experts.parameters())
        assert products.dtypes == [(torch.bfloat16, torch.float32)] * 2 * chunks * len(weights)
        # Of each weight and micro-batch one, whatever the number of chunks.
        assert Counter(products.placeholders) == Counter(2 * [tuple(one.shape) for one in weights])
        assert all(weight.grad_added_to_main_grad for weight in weights)
        gradients.append([weight.main_grad.clone() for weight in model.layer.parameters()])
    return max(
        float((mine - theirs).abs().max() / theirs.abs().max())
        for mine, theirs in zip(*gradients, strict=True)
    )


def compare_trainings(case: Case, chunks_of_step: list[int], num_micro_batches: int) -> float:
    """The largest difference of a parameter after the steps, in units of the largest parameter."""
    with gradient_accumulation_fusion():
        split, calls = train(case, chunks_of_step, num_micro_batches)
        whole, _ = train(case, [1] * len(chunks_of_step), num_micro_batches)
        before = dict(build_layer(case, "monta", moe_monta_num_chunks=1).named_parameters())
    assert calls.keys() == {1}, f"calls of a hook in a micro-batch: {calls}"
    for name, value in whole.items():
        assert not torch.equal(value, before[name]), f"{name} was not trained"
    return max(
        float((split[name] - value).abs().max() / value.abs().max())
        for name, value in whole.items()
    )


def compare_bits(case: Case, num_chunks: int) -> None:
    """Experts that compute each value by itself: split and whole, nothing differs at all."""
    hidden, routing_map = make_batch(case, seeded_by_rank())
    split, whole = (
        phases(
            build_layer(case, "monta", moe_monta_num_chunks=chunks).token_dispatcher,
            hidden.to(getattr(torch, case.dtype)),
            routing_map,
        )
        for chunks in (num_chunks, 1)
    )
    names = ("output", "gradient of the input", "gradient of the probabilities")
    for name, mine, theirs in zip(names, split[1:], whole[1:], strict=True):
        assert_equal(mine, theirs, name)


def refusal_of_sharded_weights(case: Case) -> str:
    """The error of a layer whose weights Megatron-FSDP has taken over."""
    layer = build_layer(case, "monta", moe_monta_num_chunks=2)
    for parameter in layer.experts.parameters():
        parameter.__fsdp_param__ = True
    return error_of(forward_backward, case, layer)
