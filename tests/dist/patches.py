"""Parts of Megatron and of ours that tests replace, on the ranks of a pool."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def rows_counted_from_the_map() -> Iterator[None]:
    """Let stock's dispatcher take tokens with any number of experts, as frameworks patch it.

    Without capacity it assumes top-k of them.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    original = MoEAlltoAllTokenDispatcher.preprocess

    def preprocess(self: Any, routing_map: torch.Tensor) -> Any:
        result = original(self, routing_map)
        if not self.drop_and_pad:
            self.num_out_tokens = int(routing_map.sum())
        return result

    with mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", preprocess):
        yield


@contextlib.contextmanager
def capturing_preprocess() -> Iterator[None]:
    """Build dispatchers as Megatron does where it captures moe_preprocess."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    original = MoEAlltoAllTokenDispatcher.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.cuda_dtoh_point = "before_ep_alltoall"

    with mock.patch.object(MoEAlltoAllTokenDispatcher, "__init__", init):
        yield


@contextlib.contextmanager
def in_interpreter(dispatcher: Any) -> Iterator[None]:
    """Run a dispatcher's Triton kernels on the host, see `Pool`."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "kernels would be launched on a GPU"
    from monta_megatron.exchange import count_messages
    from monta_megatron.integration import first_use

    dispatcher.setup = replace(dispatcher.setup, is_fused=True)
    with (
        mock.patch.object(count_messages, "is_fused", lambda *_: True),
        # It takes 20 s for 256 tokens.
        mock.patch.object(first_use, "NUM_TOKENS", 16),
    ):
        yield


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


@contextlib.contextmanager
def gradient_accumulation_fusion() -> Iterator[Counter[tuple[int, ...]]]:
    """Let Megatron's linear layers add to `main_grad` themselves, by operations of PyTorch.

    Yields the shapes of what products return in place of gradients, and how often.
    """
    from megatron.core.tensor_parallel import layers

    placeholders = Counter[tuple[int, ...]]()

    def placeholder(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        placeholders[tuple(shape)] += 1
        return torch.empty(shape, dtype=dtype)

    def add(rows: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.addmm_(gradient.to(main_grad.dtype).t(), rows.to(main_grad.dtype))

    with mock.patch.multiple(
        layers,
        create=True,
        HAVE_TE=True,
        get_dummy_wgrad=placeholder,
        _grad_accum_fusion_available=True,
        fused_weight_gradient_mlp_cuda=SimpleNamespace(wgrad_gemm_accum_fp32=add),
    ):
        yield placeholders
