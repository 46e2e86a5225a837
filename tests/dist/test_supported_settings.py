"""What Megatron's settings ask of a dispatcher (supported_settings.py), against stock."""

import copy
import pickle
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import golden
import pytest
import torch
import torch.distributed as dist
import yaml
from cuda_graphs import replay_cuda_graph_attributes
from equal import assert_equal
from layers import (
    Case,
    assert_same_results,
    build_layer,
    build_moe,
    build_pair,
    compare,
    error_of,
    forward_backward,
    initialize,
    layer_spec,
    transformer_config,
)
from pool import on_ranks

from monta_megatron.integration import arguments
from monta_megatron.integration.arguments import answer_should_free_input
from monta_megatron.integration.options import Options
from monta_megatron.integration.supported_settings import (
    UNSUPPORTED,
    UNSUPPORTED_WITH_OVERLAP,
    check_supported,
)

# 2 nodes of 2 ranks; with expert tensor parallelism where the chain can have it.
WHOLE, IN_PARTS = {"tp": 2, "ep": 4}, {"tp": 2, "ep": 2, "etp": 2}
CASES = [
    Case(chain="alltoall_allgather", **IN_PARTS),
    Case(chain="allgather", **IN_PARTS),
    Case(chain="alltoall_dedup", **WHOLE),
    Case(chain="hierarchical_allgather", **IN_PARTS),
    Case(chain="hierarchical_alltoall", **WHOLE),
]
SPLIT_CASES = [replace(case, pipelined=True) for case in CASES if case.has_tokens]
CASE = CASES[0]
CHUNKS = [1, 3]


# On the oldest Megatron-Core two chains are enough.
PARAMETERS = [
    pytest.param(
        case, id=case.chain + ", pipelined" * case.pipelined, marks=[pytest.mark.old_end] * is_old
    )
    for case in [*CASES, *SPLIT_CASES]
    for is_old in [case in (CASE, SPLIT_CASES[-1])]
]
of_every_chain = pytest.mark.parametrize("case", PARAMETERS[: len(CASES)])
with_experts_too = pytest.mark.parametrize("case", PARAMETERS)

SETTINGS = yaml.safe_load(Path(__file__).with_name("layer_settings.yaml").read_text())


@pytest.mark.parametrize("setting", SETTINGS["layers"])
@with_experts_too
@on_ranks(4)
def test_a_layer(case: Case, setting: str) -> None:
    compare(replace(case, **SETTINGS["layers"][setting]), CHUNKS)


@pytest.mark.parametrize("factor", [0.75, 2.0])
@with_experts_too
@on_ranks(4)
def test_pad_to_capacity(case: Case, factor: float) -> None:
    """Permuted tokens, by name or as auto chooses; chains of tokens are refused."""
    config = {"moe_expert_capacity_factor": factor, "moe_pad_expert_input_to_capacity": True}
    case = replace(case, routing="router", config=config)
    if not case.has_tokens:
        compare(case, CHUNKS)
        return
    refused = error_of(build_layer, case)
    assert refused.startswith(f"moe_monta_chain: {case.chain} cannot run here: its rows are tokens")
    (choice,) = compare(replace(case, chain="auto"))
    assert not choice.splits_experts


@pytest.mark.parametrize("num_chunks", CHUNKS)
@pytest.mark.parametrize(
    ("align_to", "changes"),
    # The second as Transformer Engine's grouped tensors need it, in bf16 too.
    [(16, {}), (256, {"dtype": "bfloat16", "tokens": (300,)})],
    ids=["16", "256"],
)
@of_every_chain
@on_ranks(4)
def test_router_padding(
    case: Case, align_to: int, changes: dict[str, Any], num_chunks: int
) -> None:
    """To a multiple of rows: Megatron ties it to fp8, the dispatcher does not."""
    from megatron.core.transformer.moe import token_dispatcher

    case = replace(case, **changes, num_chunks=num_chunks)
    align, results = "get_align_size_for_quantization", []
    with mock.patch.object(token_dispatcher, align, lambda config: align_to):
        for layer in build_pair(case):
            layer.config.moe_router_padding_for_quantization = True
            results.append(forward_backward(case, layer))
    stock, ours = results
    assert (stock.calls[0] % align_to == 0).all()
    assert torch.equal(ours.calls[0], stock.calls[0])
    assert_same_results(ours, stock, case.exact_sums, str(case))


# Tokens with two or three experts on most ranks, by chains that add a token's rows by EP rank, then
# by expert, as Megatron's batch-invariant mode does. No chain of tokens does, so auto splits no
# experts.
MANY_EXPERTS = {"num_local_experts": 4, "topk": 9}


@pytest.mark.parametrize(
    "case",
    [
        Case(chain="alltoall", **MANY_EXPERTS),
        *(Case(num_chunks=num_chunks, **MANY_EXPERTS) for num_chunks in CHUNKS),
        Case(tp=2, ep=2, etp=2, num_local_experts=4, topk=6, num_chunks=3),
        Case(chain="auto", pipelined=True, options={"tune_steps": 0}, **MANY_EXPERTS),
    ],
)
@on_ranks(4)
def test_batch_invariant_sums(case: Case) -> None:
    """Stock's bits, which are not those of its usual sums.

    Without the kernels that Megatron's mode puts in place of torch's.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "is_batch_invariant_mode_enabled"):
        pytest.skip("needs Megatron-Core >= 0.20, which orders a token's sum in this mode")
    from megatron.core.transformer.custom_layers import batch_invariant_kernels
    from megatron.core.transformer.enums import AttnBackend

    case = replace(case, params_dtype="bfloat16", by_value=True)
    usual = build_layer(case, "alltoall")
    demanded = {
        "batch_invariant_mode": True,
        "batch_invariant_backend": "te_native",
        "attention_backend": AttnBackend.flash,
        "flash_attention_version": 3,
        "attention_dropout": 0.0,
    }
    # In fp32 the order shows in the last bits, in bf16 every rounding does.
    for dtype in ("float32", "bfloat16"):
        each = replace(case, dtype=dtype, config=demanded)
        in_any_order = forward_backward(each, usual)
        with mock.patch.object(batch_invariant_kernels, "_batch_invariant_MODE", True):
            stock, ours = (forward_backward(each, layer) for layer in build_pair(each))
        assert not torch.equal(stock.values["output"], in_any_order.values["output"])
        assert torch.equal(ours.values["output"], stock.values["output"])
        assert_same_results(ours, stock, case.exact_sums, dtype)


@pytest.mark.parametrize("num_chunks", CHUNKS)
@with_experts_too
@on_ranks(4)
def test_cuda_graph_attributes_replay(case: Case, num_chunks: int) -> None:
    for changes in SETTINGS["captured"]:
        replay_cuda_graph_attributes(replace(case, **changes, num_chunks=num_chunks))


def train_under_overlap_schedule(case: Case, dispatcher: str) -> dict[str, torch.Tensor]:
    """Losses and gradients of four micro-batches, each forward beside another one's backward."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    initialize(case)
    config = transformer_config(case, dispatcher)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config, spec, vocab_size=32, max_sequence_length=8)
    model = model.to(device="cuda", dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(case.seed + dist.get_rank() // case.tp)
    tokens = torch.randint(32, (4, 2, 9), generator=generator).to("cuda")

    def forward_step(batches: Any, model: Any, return_schedule_plan: bool) -> tuple[Any, Any]:
        assert return_schedule_plan
        batch = next(batches)
        plan = model.build_schedule_plan(
            batch[:, :-1], torch.arange(8).expand(2, 8), None, labels=batch[:, 1:]
        )
        return plan, lambda losses: (losses.mean(), {"loss": losses.detach()})

    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(tokens),
        model=[model],
        num_microbatches=len(tokens),
        seq_length=8,
        micro_batch_size=2,
        forward_only=False,
    )
    results = {f"loss {number}": each["loss"] for number, each in enumerate(losses)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        results[name] = parameter.grad
    return results


@pytest.mark.parametrize("num_local_experts", [1, 2])
@of_every_chain
@on_ranks(4)
def test_overlap_schedule(case: Case, num_local_experts: int) -> None:
    """Megatron's 1F1B schedule that hides the exchange behind another micro-batch's work.

    The layers are [MoE, dense, MoE, MoE], so that in the schedule, which pairs the first layer with
    the last, an MoE layer meets itself, another one, and a dense one.
    """
    from megatron.core.tensor_parallel import RowParallelLinear
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    # With top-2 and whole experts every chain adds the same two terms, so all are equal to the bit.
    etp = case.etp if case.exact_sums else 1
    if num_local_experts == etp == 1 and metadata.version("megatron-core").startswith("0.16"):
        pytest.skip(
            "0.16 frees what a single local expert still needs, with stock's dispatcher too"
        )
    config = {
        "num_layers": 4,
        "moe_layer_freq": [1, 0, 1, 1],
        "overlap_moe_expert_parallel_comm": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Without Transformer Engine nothing is delayed; but the schedule is the one that asks for
        # it, where Megatron's own linear layers can be asked (not in 0.16).
        "delay_wgrad_compute": num_local_experts > 1 and hasattr(RowParallelLinear, "backward_dw"),
    }
    if hasattr(MoETokenDispatcher, "reset_transient_forward_state"):
        # Megatron's branch dev can recompute whole layers: one of MoE and one that is dense.
        config |= {"recompute_granularity": "full", "recompute_method": "block"}
        config |= {"recompute_num_layers": 2}
    case = replace(
        case,
        ep=4 // etp,
        etp=etp,
        num_local_experts=num_local_experts,
        dtype="bfloat16",
        config=config,
        num_chunks=3,
    )
    stock, ours = (train_under_overlap_schedule(case, name) for name in ("alltoall", "monta"))
    assert ours.keys() == stock.keys()
    for name, mine in ours.items():
        assert_equal(mine, stock[name], name)


@pytest.mark.old_end
@on_ranks(4)
def test_configuration_made_in_code() -> None:
    initialize(CASE)
    config = transformer_config(replace(CASE, num_chunks=3))
    copies = copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config)
    for each in (config, *copies):
        dispatcher = build_moe(layer_spec(CASE), each).token_dispatcher
        assert type(dispatcher).__name__ == "MontaTokenDispatcher"
        assert (dispatcher.choice.chain, dispatcher.choice.num_chunks) == (CASE.chain, 3)


@pytest.mark.old_end
@on_ranks(4)
def test_layer_spec() -> None:
    """The way in by a spec, with the stock name in the configuration."""
    from monta_megatron.integration.layer import with_monta

    initialize(CASE)
    spec, config = layer_spec(CASE), transformer_config(CASE, "alltoall")
    for each, name in (
        (with_monta(spec), "MontaTokenDispatcher"),
        (spec, "MoEAlltoAllTokenDispatcher"),
    ):
        assert type(build_moe(each, config).token_dispatcher).__name__ == name
    overlaps = {"overlap_moe_expert_parallel_comm": True}
    config = transformer_config(replace(CASE, dtype="bfloat16", config=overlaps), "alltoall")
    error = error_of(build_moe, with_monta(spec), config)
    assert error.startswith("overlap_moe_expert_parallel_comm: got True, must be False with the ")
    with mock.patch.object(arguments, "_answered", []):
        error = error_of(build_layer, replace(CASE, dtype="bfloat16", config=overlaps))
    assert error.startswith("overlap_moe_expert_parallel_comm: got True, must be False with this ")


@pytest.mark.old_end
@pytest.mark.parametrize("low_precision", [{}, {"fp8": "hybrid", "first_last_layers_bf16": True}])
def test_the_overlap_schedule_frees_no_experts_input(low_precision: dict[str, Any]) -> None:
    ask, freed = answer_should_free_input(lambda name, is_moe, config: True), {}
    for name in ("alltoall", "monta"):
        config = SimpleNamespace(moe_token_dispatcher_type=name, **low_precision)
        freed[name] = [ask(node, True, config) for node in ("moe_dispatch", "mlp", "moe_combine")]
    assert freed == {"alltoall": [True, True, True], "monta": [True, False, True]}


def answer_to(settings: str) -> str:
    """What settings are refused with, or only with the experts in the pipeline."""
    for overlaps in (False, True):
        given = SimpleNamespace(moe_monta_overlap_experts=overlaps, **yaml.safe_load(settings))
        if refusal := error_of(check_supported, given) or error_of(Options.of, given):
            return refusal
    return "supported"


@pytest.mark.old_end
def test_settings_that_are_refused() -> None:
    answers = []

    def answer(settings: str) -> str:
        answers.append(answer_to(settings))
        return answers[-1]

    golden.check_cases(Path(__file__).with_name("settings.txt"), answer)
    refused = {line.partition(": not supported ")[0] for line in answers}
    assert refused >= {each.setting for each in UNSUPPORTED + UNSUPPORTED_WITH_OVERLAP}
