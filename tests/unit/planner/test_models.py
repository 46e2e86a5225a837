"""Models from Megatron's arguments, worked by hand: layers, sizes, bytes, parameters, refusals."""

import ast
from typing import Any

import golden
import pytest
from clusters import GOLDEN, by_hand

from monta_megatron.planner.layout import max_moe_layers
from monta_megatron.planner.model import Model, model_of
from monta_megatron.planner.ranking import num_parameters

MODELS = by_hand("models")


def small_model(**changes: Any) -> Model:
    given = MODELS["small"] | {name.replace("_", "-"): changes[name] for name in changes}
    return model_of({k: v for k, v in given.items() if v != "left out"}, "small", "a.yaml")


@pytest.mark.parametrize("case", MODELS["cases"], ids=lambda case: str(case["given"]))
def test_models_by_hand(case: dict[str, Any]) -> None:
    model = small_model(**case["given"])
    for name in case.keys() - {"given", "max_moe_layers"}:
        found = num_parameters(model) if name == "num_parameters" else getattr(model, name)
        assert (list(found) if isinstance(found, tuple) else found) == case[name], name
    for num_stages, most in case.get("max_moe_layers", {}).items():
        assert max_moe_layers(model, num_stages) == most


def test_wrong_arguments() -> None:
    def answer(changes: str) -> str:
        return golden.refusal(small_model, **ast.literal_eval(changes))

    golden.check_cases(GOLDEN / "wrong_arguments.txt", answer)
