"""Megatron builds, from the arguments of a config.json, a model of the published size.

On the meta device: a layer of each kind, and the others counted like it.
"""

import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from published_configs import (
    CONFIGS,
    NEEDS_TRANSFORMER_ENGINE,
    NUM_PARAMETERS,
    OF_THE_CLASS,
    model_of_config,
)

from monta_megatron.planner.model import Model
from monta_megatron.tools.launch.run_config import words_of

pytest.importorskip("megatron.training")

# Mamba needs its own kernels even on the meta device.
HYBRID = {"nemotron_3_nano"}

# How they are computed is no matter of a count; a softmax with weights needs Transformer Engine.
PLAIN = "--transformer-impl local --no-rope-fusion --no-persist-layer-norm"
PLAIN += " --no-gradient-accumulation-fusion --micro-batch-size 1 --seq-length 64 --bf16"
PLAIN += " --num-layers 2 --moe-layer-freq [0,1]"
# Nor are rotations; the numbers leave multi-token prediction out.
LEFT_OUT = ("num-layers", "moe-layer-freq", "softmax-type", "window-size", "window-attn-skip-freq")
LEFT_OUT += ("no-rope-freq", "mtp-num-layers", "seq-length", "micro-batch-size", "bf16")


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def built(model: Model, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A dense layer and one with experts between embedding and output."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.training.arguments import core_transformer_config_from_args, parse_args

    given = {name: value for name, value in model.arguments.items() if name not in LEFT_OUT}
    if "multi-latent-attention" in given and "q-lora-rank" not in given:
        # Without Transformer Engine there is no norm of queries that are not factored.
        del given["qk-layernorm"]
    words = [*PLAIN.split(), *chain.from_iterable(words_of(given))]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "meta")
    # Megatron's own core of attention, which has no weights, knows no latent attention.
    core = DotProductAttention.__init__

    def without_channels(self: Any, *values: Any, **named: Any) -> None:
        named = {name: each for name, each in named.items() if not name.endswith("_channels")}
        core(self, *values, **named)

    monkeypatch.setattr(DotProductAttention, "__init__", without_channels)
    arguments = parse_args()
    arguments.params_dtype = torch.bfloat16
    arguments.use_cpu_initialization, arguments.perform_initialization = True, False
    config = core_transformer_config_from_args(arguments)
    with torch.device("meta"):
        return GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=arguments.normalization
            ),
            vocab_size=arguments.vocab_size,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        )


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - NEEDS_TRANSFORMER_ENGINE - HYBRID))
def test_the_model_has_the_published_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 2% of a checkpoint, or of the class of its family where that is rounded."""
    model = model_of_config(CONFIGS[name], name)
    whole = built(model, monkeypatch)
    total, dense, sparse = (
        sum(parameter.numel() for parameter in part.parameters())
        for part in (whole, *whole.decoder.layers)
    )
    num_moe = sum(model.moe_layers)
    total += (model.num_layers - num_moe - 1) * dense + (num_moe - 1) * sparse
    assert total == pytest.approx({**NUM_PARAMETERS, **OF_THE_CLASS}[name], rel=0.02)
