"""Models from Megatron's arguments, worked by hand: layers, sizes, bytes, parameters, refusals."""

import ast
from typing import Any

import golden
import pytest
from clusters import GOLDEN, by_hand

from monta_megatron.planner.layout import most_moe_layers
from monta_megatron.planner.model import Model, model_of

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


def small_model(**changes: Any) -> Model:
    given = {**SMALL, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return model_of({k: v for k, v in given.items() if v != "left out"}, "small", "a.yaml")


@pytest.mark.parametrize("case", by_hand("models"), ids=lambda case: str(case["given"]))
def test_models_by_hand(case: dict[str, Any]) -> None:
    model = small_model(**case["given"])
    for name in case.keys() - {"given", "most_moe_layers"}:
        found = getattr(model, name)
        assert (list(found) if name == "moe_layers" else found) == case[name], name
    for num_stages, most in case.get("most_moe_layers", {}).items():
        assert most_moe_layers(model, num_stages) == most


def test_wrong_arguments() -> None:
    def answer(changes: str) -> str:
        return golden.refusal(small_model, **ast.literal_eval(changes))

    golden.check_cases(GOLDEN / "wrong_arguments.txt", answer)
