"""Which of Megatron's settings change a dispatcher's duty, and whether ours fulfils it.

Every such setting is listed, as `runs` with the test that shows it, or as `refused` with the
reason; a refused one is an error when the configuration is made, so that none is dropped
unnoticed.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple


class Duty(NamedTuple):
    """A setting and what becomes of it.

    Attributes:
        setting: field of TransformerConfig, or a value of one.
        asked: whether a configuration asks for it.
        status: "runs" or "refused".
        reason: the test that shows it, or why it is refused.
    """

    setting: str
    asked: Callable[[Any], bool]
    status: Literal["runs", "refused"]
    reason: str


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda config: bool(getattr(config, name, None))


def _cuda_graph_modules(config: Any) -> set[str]:
    # 0.16 calls the field cuda_graph_scope; members are enums or strings by release.
    modules = getattr(config, "cuda_graph_modules", None) or getattr(
        config, "cuda_graph_scope", None
    )
    return {getattr(module, "name", str(module)) for module in modules or []}


def _graphs_whole_exchange(config: Any) -> bool:
    implementation = getattr(config, "cuda_graph_impl", "none")
    if implementation == "none":
        return False
    modules = _cuda_graph_modules(config)
    # 0.16 names the whole iteration among the modules.
    whole = implementation == "full_iteration" or bool(modules & {"full_iteration", "moe"})
    return whole or not modules


TESTS = "tests/dist/test_duties.py::"

DUTIES = (
    Duty(
        "moe_shared_expert_overlap",
        _is_set("moe_shared_expert_overlap"),
        "runs",
        TESTS + "test_shared_experts_overlap",
    ),
    Duty(
        "moe_shared_expert_intermediate_size without overlap",
        _is_set("moe_shared_expert_intermediate_size"),
        "runs",
        TESTS + "test_shared_experts",
    ),
    Duty(
        "moe_expert_capacity_factor",
        _is_set("moe_expert_capacity_factor"),
        "runs",
        TESTS + "test_capacity_factor",
    ),
    Duty(
        "moe_pad_expert_input_to_capacity",
        _is_set("moe_pad_expert_input_to_capacity"),
        "runs",
        TESTS + "test_pad_to_capacity",
    ),
    Duty(
        "moe_router_padding_for_quantization",
        lambda config: any(
            getattr(config, name, False)
            for name in ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
        ),
        "runs",
        TESTS + "test_router_padding",
    ),
    Duty(
        "moe_permute_fusion",
        _is_set("moe_permute_fusion"),
        "runs",
        "tests/dist/test_transformer_engine.py::test_te_spec_equals_stock",
    ),
    Duty(
        "moe_latent_size",
        _is_set("moe_latent_size"),
        "runs",
        TESTS + "test_latent_size",
    ),
    Duty(
        "recompute_granularity='full'",
        lambda config: getattr(config, "recompute_granularity", None) == "full",
        "runs",
        "tests/megatron/test_training.py::test_training_settings",
    ),
    Duty(
        "recompute_modules=['moe']",
        lambda config: "moe" in (getattr(config, "recompute_modules", None) or []),
        "runs",
        TESTS + "test_selective_recompute",
    ),
    Duty(
        "variable_seq_lengths",
        _is_set("variable_seq_lengths"),
        "runs",
        TESTS + "test_token_count_changes_every_step",
    ),
    Duty(
        "cuda_graph_modules with moe_preprocess",
        lambda config: "moe_preprocess" in _cuda_graph_modules(config),
        "runs",
        TESTS + "test_cuda_graph_attributes_replay",
    ),
    Duty(
        "CUDA graphs over a whole MoE layer",
        _graphs_whole_exchange,
        "refused",
        "capturing the exchange itself has not been tested on a GPU; name the modules to capture "
        "in cuda_graph_modules and leave 'moe' out",
    ),
    Duty(
        "overlap_moe_expert_parallel_comm",
        _is_set("overlap_moe_expert_parallel_comm"),
        "refused",
        "the 1F1B overlap schedule has not been run with this dispatcher; leave "
        "--overlap-moe-expert-parallel-comm out",
    ),
    Duty(
        "delay_wgrad_compute",
        _is_set("delay_wgrad_compute"),
        "refused",
        "Megatron delays weight gradients only under the 1F1B overlap schedule, which is refused",
    ),
    Duty(
        "overlap_dispatch_backward_with_experts_wgrad",
        _is_set("overlap_dispatch_backward_with_experts_wgrad"),
        "refused",
        "needs Transformer Engine's delayed weight gradients, untested with this dispatcher",
    ),
)


def check_duties(config: Any) -> None:
    """Refuse a configuration that asks for a duty this dispatcher does not fulfil.

    Raises:
        ValueError: names the setting and the reason.
    """
    for duty in DUTIES:
        if duty.status == "refused" and duty.asked(config):
            raise ValueError(
                f"{duty.setting}: not supported with moe_token_dispatcher_type='monta': "
                f"{duty.reason}"
            )
