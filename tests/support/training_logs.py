"""Logs as Megatron-LM's loop prints them, made from sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

QWEN3_30B = {
    "num_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 4,
    "kv_channels": 128,
    "ffn_hidden_size": 6144,
    "num_experts": 128,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 768,
    "vocab_size": 151936,
    "multi_latent_attention": False,
    "kv_lora_rank": 32,
}
# The 14 layers of H1 to H4 in the published figures.
DEEPSEEK_14 = {
    "num_layers": 14,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "ffn_hidden_size": 18432,
    "num_experts": 256,
    "moe_layer_freq": "[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]",
    "moe_router_topk": 8,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "vocab_size": 129280,
}
TRAINING = {
    "micro_batch_size": 1,
    "global_batch_size": 256,
    "seq_length": 4096,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
    "moe_permute_fusion": True,
    "overlap_moe_expert_parallel_comm": False,
    "recompute_granularity": None,
    "cuda_graph_impl": "none",
    "virtual_pipeline_model_parallel_size": None,
}


_ON_16 = {**QWEN3_30B, "world_size": 16, "expert_model_parallel_size": 16}
_ON_64 = {
    **QWEN3_30B,
    "world_size": 64,
    "tensor_model_parallel_size": 8,
    "pipeline_model_parallel_size": 4,
    "expert_model_parallel_size": 16,
}
# Rows of configs/estimate/published.yaml: arguments, and ms of an iteration, which follows in H2
# from its 184.2 TFLOP/s.
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "A1": ({**_ON_64, "micro_batch_size": 4}, 8600),
    "A2": ({**_ON_64, "micro_batch_size": 1}, 27890),
    "F4": ({**_ON_16, "global_batch_size": 1024, "moe_permute_fusion": False}, 41250),
    "H2": (
        {
            **DEEPSEEK_14,
            "world_size": 64,
            "pipeline_model_parallel_size": 4,
            "expert_model_parallel_size": 16,
            "seq_length": 2048,
            "recompute_granularity": "full",
        },
        2589,
    ),
}


def published_log(row: str) -> str:
    """The log that a published row would have had."""
    return training_log(*PUBLISHED[row])


def arguments_block(arguments: Mapping[str, Any]) -> list[str]:
    """The block that Megatron prints when a training starts."""
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in arguments.items()]
    return [
        "------------------------ arguments ------------------------",
        *sorted(lines, key=str.lower),
        "-------------------- end of arguments ---------------------",
    ]


def iteration_lines(times_ms: Sequence[float], first: int = 1) -> list[str]:
    """The loop's line of each iteration."""
    last = first + len(times_ms) - 1
    return [
        f" [2026-01-01 00:00:{number % 60:02}.000000] iteration {number:8}/{last:8} | consumed "
        f"samples: {256 * number:12} | elapsed time per iteration (ms): {ms:.1f} | throughput per "
        "GPU (TFLOP/s/GPU): 123.4 | learning rate: 1.0E-04 | global batch size:   256 | lm loss: "
        "9.1E+00 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        for number, ms in enumerate(times_ms, first)
    ]


def training_log(arguments: Mapping[str, Any], iteration_ms: float, gpu: str = "H100") -> str:
    """The log of twelve iterations, the first of which takes three times as long."""
    times_ms = [3 * iteration_ms, *[iteration_ms * (1 + 0.001 * (n % 3 - 1)) for n in range(11)]]
    return "\n".join(
        [
            f"using NVIDIA {gpu} 80GB HBM3",
            *arguments_block({**TRAINING, **arguments}),
            "[Rank 0] (after 2 iterations) memory (MB) | allocated: 30000 | max allocated: 60000.0",
            *iteration_lines(times_ms),
            "",
        ]
    )
