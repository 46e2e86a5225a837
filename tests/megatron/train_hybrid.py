"""The quickstart's training with a HybridModel: a stack of attention and MoE layers.

Megatron's own spec of such a stack takes Transformer Engine; this one is made of the same local
layers as its GPT model. `--monta-in-spec` puts our dispatcher into it, so that nothing is patched.
"""

import sys
from pathlib import Path
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.training.argument_utils import hybrid_config_from_args

from monta_megatron.integration.layer import with_monta

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "quickstart"))
import train


def stack_spec(num_experts: int) -> ModuleSpec:
    """A stack of layers that each do one thing: the halves of a GPT layer with experts."""
    layer = get_gpt_layer_local_submodules(num_experts=num_experts, moe_grouped_gemm=False)
    attention = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm,
        self_attention=layer.self_attention,
        self_attn_bda=layer.self_attn_bda,
    )
    experts = TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda
    )
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=experts),
        ),
    )


def config_from_args(args: Any) -> Any:
    config = hybrid_config_from_args(args)
    spec = stack_spec(args.num_experts)
    config.hybrid_stack_spec = with_monta(spec) if MONTA_IN_SPEC else spec
    return config


MONTA_IN_SPEC = "--monta-in-spec" in sys.argv
if MONTA_IN_SPEC:
    sys.argv.remove("--monta-in-spec")
# The stack's last norm is Transformer Engine's, whatever the spec says.
hybrid_block.TENorm = WrappedTorchNorm
train.gpt_config_from_args = config_from_args
train.main()
