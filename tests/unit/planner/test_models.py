"""Models from Megatron's arguments, worked by hand: layers, sizes, bytes, parameters, refusals."""

import ast
from pathlib import Path
from typing import Any

import golden
import pytest

from monta_megatron.planner.layout import most_moe_layers
from monta_megatron.planner.model import Model, model_of

GOLDEN = Path(__file__).parent / "golden"
# H = 8, 2 heads, 4 experts of FFN size 16, gated.
SMALL: dict[str, Any] = {
    "num-layers": 4,
    "hidden-size": 8,
    "num-attention-heads": 2,
    "ffn-hidden-size": 32,
    "num-experts": 4,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": 16,
    "swiglu": True,
    "vocab-size": 10,
    "position-embedding-type": "rope",
    "seq-length": 64,
    "micro-batch-size": 2,
}


def model(**changes: Any) -> Model:
    given = {**SMALL, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return model_of({k: v for k, v in given.items() if v != "left out"}, "small", "a.yaml")


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [
        ("left out", [1, 1, 1, 1]),
        (1, [1, 1, 1, 1]),
        ("2", [1, 0, 1, 0]),
        ("([0]*1+[1]*3)", [0, 1, 1, 1]),
        ("[0, 1, 0, 1]", [0, 1, 0, 1]),
    ],
)
def test_layers_with_experts(frequency: Any, layers: list[int]) -> None:
    assert list(model(moe_layer_freq=frequency).moe_layers) == [bool(one) for one in layers]


def test_layers_of_a_hybrid_pattern() -> None:
    hybrid = model(hybrid_layer_pattern="ME*E|M-/*E", num_layers="left out")
    assert hybrid.moe_layers == (False, True, False, True, False, False)
    assert hybrid.num_parameters is None


@pytest.mark.parametrize(
    ("changes", "value_bytes", "prob_bytes"),
    [
        ({}, 4, 4),
        ({"bf16": True}, 2, 2),
        ({"fp16": "True"}, 2, 2),
        ({"bf16": "False"}, 4, 4),
        ({"bf16": True, "moe_router_dtype": "fp32"}, 2, 4),
        ({"bf16": True, "moe_router_dtype": "torch.float64"}, 2, 8),
        ({"bf16": True, "moe_router_dtype": "None"}, 2, 2),
    ],
)
def test_bytes_of_a_row(changes: dict[str, Any], value_bytes: int, prob_bytes: int) -> None:
    read = model(**changes)
    assert (read.value_bytes, read.prob_bytes) == (value_bytes, prob_bytes)


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        # Each layer: attention 4 x 8 x 8, experts 4 x 3 x 8 x 16, router 8 x 4; embedding 10 x 8.
        ({}, 4 * (256 + 1536 + 32) + 80),
        ({"untie_embeddings_and_output_weights": True}, 4 * 1824 + 160),
        # Two matrices without a gate.
        ({"swiglu": False}, 4 * (256 + 1024 + 32) + 80),
        # Without an FFN size it is 8/3 of H, in multiples of 64: 128 of 64 at H 64.
        (
            {"hidden_size": 64, "ffn_hidden_size": "left out", "moe_layer_freq": "([0]*3+[1]*1)"},
            4 * 4 * 64 * 64 + 3 * 3 * 64 * 128 + 4 * 3 * 64 * 16 + 64 * 4 + 640,
        ),
        # A dense layer has 3 x 8 x 32 in place of experts and router.
        ({"moe_layer_freq": "([0]*1+[1]*3)"}, 3 * 1824 + 256 + 768 + 80),
        ({"moe_shared_expert_intermediate_size": 16}, 4 * (1824 + 3 * 8 * 16) + 80),
        # One key and value head of two: 8 x 4 x (2 x 2 + 2 x 1).
        (
            {"group_query_attention": True, "num_query_groups": 1},
            4 * (192 + 1536 + 32) + 80,
        ),
        # Rows of 4 to the experts: 4 x 3 x 4 x 16, and two projections of 8 x 4.
        ({"moe_latent_size": 4}, 4 * (256 + 768 + 32 + 64) + 80),
        # Latent attention: queries 8 x 2 x (4 + 2), keys and values 8 x (3 + 2) + 3 x 2 x (4 + 4),
        # output 2 x 4 x 8.
        (
            {
                "multi_latent_attention": True,
                "qk_head_dim": 4,
                "qk_pos_emb_head_dim": 2,
                "v_head_dim": 4,
                "kv_lora_rank": 3,
            },
            4 * (96 + 40 + 48 + 64 + 1536 + 32) + 80,
        ),
        ({"vocab_size": "left out"}, None),
    ],
)
def test_parameters_by_hand(changes: dict[str, Any], parameters: int | None) -> None:
    assert model(**changes).num_parameters == parameters


def test_rows_have_the_latent_size() -> None:
    assert (model().row_size, model(moe_latent_size="4").row_size) == (8, 4)


def test_wrong_arguments() -> None:
    def answer(changes: str) -> str:
        return golden.refusal(model, **ast.literal_eval(changes))

    golden.check_cases(GOLDEN / "wrong_arguments.txt", answer)


@pytest.mark.parametrize(
    ("frequency", "pp", "most"),
    [
        ("([0]*2+[1]*2)", 1, 2),
        # The stages 0 0 | 1 1.
        ("([0]*2+[1]*2)", 2, 2),
        # 1 0 | 1 0.
        (2, 2, 1),
        # Two layers each for the first two: 0 0 | 1 1.
        ("([0]*2+[1]*2)", 3, 2),
        (1, 4, 1),
    ],
)
def test_moe_layers_of_the_stage_with_the_most(frequency: Any, pp: int, most: int) -> None:
    assert most_moe_layers(model(moe_layer_freq=frequency), pp) == most
