"""What experts inside the pipeline (moe_monta_overlap_experts) need of a training.

The experts are called once for every chunk. What works with several calls of a module in flight, as
pipeline schedules make them, works; what expects one call in a micro-batch is refused by name.
"""

import torch

from monta_megatron.chains import CHAINS
from monta_megatron.integration.supported_settings import Unsupported

_TESTS = "tests/dist/test_overlap_experts.py::"

# Setting of `supported_settings.RUNS` -> the test that shows that it works; the others are refused.
RUNS_WITH_OVERLAP = {
    "moe_shared_expert_overlap": _TESTS + "test_shared_experts_overlap",
    "moe_shared_expert_intermediate_size": _TESTS + "test_shared_experts",
    "moe_expert_capacity_factor": _TESTS + "test_capacity_factor",
    "moe_pad_expert_input_to_capacity": _TESTS + "test_pad_to_capacity",
    "moe_permute_fusion": "tests/dist/test_transformer_engine.py::test_experts_in_the_pipeline",
    "moe_latent_size": _TESTS + "test_latent_size",
    "recompute_granularity='full'": _TESTS + "test_full_recompute",
    "recompute_modules=['moe']": _TESTS + "test_selective_recompute",
    "variable_seq_lengths": _TESTS + "test_token_count_changes_every_step",
    "cuda_graph_modules with moe_preprocess": _TESTS + "test_cuda_graph_attributes_replay",
}

# Modules inside the experts whose activations Megatron can offload.
_EXPERT_MODULES = {"expert_fc1", "moe_act", "fused_group_mlp"}

# Besides `supported_settings.UNSUPPORTED`.
UNSUPPORTED_WITH_OVERLAP = (
    Unsupported(
        "overlap_moe_expert_parallel_comm",
        lambda config: getattr(config, "overlap_moe_expert_parallel_comm", False),
        "Megatron's schedule hides the exchange behind another micro-batch, and needs dispatch, "
        "experts and combine apart",
    ),
    Unsupported(
        "delay_wgrad_compute",
        lambda config: getattr(config, "delay_wgrad_compute", False),
        "the weight gradients of one call of the experts are delayed, not those of every chunk",
    ),
    Unsupported(
        "fp8_recipe",
        lambda config: bool(getattr(config, "fp8", None)) and config.fp8_recipe == "delayed",
        "delayed scaling would take every chunk for a micro-batch; take another recipe",
    ),
    Unsupported(
        "moe_router_padding_for_quantization",
        lambda config: any(
            getattr(config, f"moe_router_padding_for_{what}", False)
            for what in ("quantization", "fp8")
        ),
        "it aligns the rows of a micro-batch, not those of a chunk; leave it out, and the experts "
        "pad what they get",
    ),
    Unsupported(
        "use_megatron_fsdp",
        lambda config: getattr(config, "use_megatron_fsdp", False),
        "it frees an expert's weights after each call, of which there is one for every chunk",
    ),
    Unsupported(
        "offload_modules",
        lambda config: (
            getattr(config, "fine_grained_activation_offloading", False)
            and not _EXPERT_MODULES.isdisjoint(config.offload_modules or ())
        ),
        "offloading of the experts' activations expects one call of them in a micro-batch; leave "
        f"out {', '.join(sorted(_EXPERT_MODULES))}",
    ),
    Unsupported(
        "cpu_offloading",
        lambda config: getattr(config, "cpu_offloading", False),
        "offloading of a whole layer's activations has not been tested with it",
    ),
    Unsupported(
        "moe_paged_stash",
        lambda config: getattr(config, "moe_paged_stash", False),
        "the stash expects one call of the experts in a micro-batch",
    ),
    Unsupported(
        "moe_ncclep_zero_copy",
        lambda config: getattr(config, "moe_ncclep_zero_copy", False),
        "the experts would write all chunks into one buffer",
    ),
)


def check_options(chain: str, records: bool) -> None:
    """Check what moe_monta_overlap_experts needs of the other options.

    Args:
        chain: the chain that is named, or "auto".
        records: whether an iteration is recorded.

    Raises:
        ValueError: names what is wrong.
    """
    option = "moe_monta_overlap_experts"
    of_tokens = ", ".join(name for name, chain in CHAINS.items() if chain.rows == "tokens")
    if chain not in CHAINS:
        raise ValueError(
            f"{option}: given, but the planner knows no prices of experts, by which it would "
            f"choose; name one of {of_tokens} in moe_monta_chain and a number of chunks in "
            "moe_monta_num_chunks"
        )
    if CHAINS[chain].rows != "tokens":
        raise ValueError(
            f"{option}: given with {chain}, must be with one of {of_tokens}; rows of the other "
            "chains are permuted by expert before they are split into chunks"
        )
    if records:
        raise ValueError(
            f"{option}: given, must be left out beside moe_monta_record, which records no compute"
        )


def check_experts(experts: torch.nn.Module) -> None:
    """Check that experts may be called for every chunk.

    Raises:
        ValueError: names the module and the reason.
    """
    for name, module in experts.named_modules():
        if isinstance(module, torch.nn.Dropout | torch.nn.AlphaDropout) and module.p > 0:
            raise ValueError(
                f"experts.{name}: dropout of {module.p:g}, must be 0 with "
                "moe_monta_overlap_experts: random numbers would differ from those of one call"
            )
