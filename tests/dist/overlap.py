"""What experts in the pipeline are tested with: grouped experts, recomputation, and DDP."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from layers import Case, build_layer, force, make_batch


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


def give_grouped_experts(layer: Any) -> None:
    """Give a layer Megatron's grouped experts."""
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

    def __init__(self, case: Case) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )

        self.layer = build_layer(case)
        self.ddp = DistributedDataParallel(
            self.layer.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
            ),
            self.layer,
        )
        self._case, self._calls, self._num_batches = case, Counter[str](), 0
        self._accumulators = []
        for name, parameter in self.layer.named_parameters():
            (accumulator,) = [parameter.expand_as(parameter).grad_fn.next_functions[0][0]]
            accumulator.register_hook(lambda *_, name=name: self._calls.update([name]))
            self._accumulators.append(accumulator)
        self.numbers_of_calls: Counter[int] = Counter()

    def accumulate(self, num_chunks: int, num_micro_batches: int) -> None:
        """Accumulate the gradients of some micro-batches in so many chunks, and reduce them."""
        chooser = self.layer.token_dispatcher.chooser
        chooser.step_choice = dataclasses.replace(
            chooser.step_choice, num_chunks=num_chunks, splits_experts=num_chunks > 1
        )
        self.ddp.zero_grad_buffer()
        for micro_batch in range(num_micro_batches):
            is_last = micro_batch == num_micro_batches - 1
            with contextlib.nullcontext() if is_last else self.ddp.no_sync():
                self._step()
            assert self.layer.token_dispatcher.choice.num_chunks == num_chunks
        self.ddp.finish_grad_sync()

    def _step(self) -> None:
        batch = make_batch(self._case, self.layer, self._num_batches)
        self._num_batches += 1
        force(self.layer.router, batch.routing_map)
        self._calls.clear()
        output, _ = self.ddp(batch.tokens.unsqueeze(1))
        (output - batch.gradient.unsqueeze(1)).float().square().mean().backward()
        self.numbers_of_calls.update(self._calls[name] for name, _ in self.layer.named_parameters())

    def train(self, chunks_of_step: Iterable[int], num_micro_batches: int) -> None:
        """Steps of the distributed optimizer, each in so many chunks."""
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = OptimizerConfig(
            optimizer="adam", lr=1e-2, use_distributed_optimizer=True, params_dtype=torch.float32
        )
        optimizer = get_megatron_optimizer(config, [self.ddp])
        for num_chunks in chunks_of_step:
            optimizer.zero_grad()
            self.accumulate(num_chunks, num_micro_batches)
            optimizer.step()


def largest_difference(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> float:
    """Of tensors, each in units of the largest value of the second."""
    return max(
        float((mine - other).abs().max() / other.abs().max())
        for mine, other in zip(ours, theirs, strict=True)
    )
