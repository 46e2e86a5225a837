"""`with_monta` on every spec that the installed Megatron has."""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

import megatron.core
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from monta_megatron.integration.layer import monta_moe_layer, with_monta

pytestmark = pytest.mark.old_end

MODULE = re.compile(r".*_specs?|multi_token_prediction")
FUNCTION = re.compile(r"(?!_)\w*_spec(s|_for_backend)?(_\w+)?")
LAYER = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False)
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_moe_experts": 8}


def specs() -> Iterator[tuple[str, Any]]:
    """Name and value of every spec, and of what every function that makes one returns."""
    # By the name of a function's argument.
    given = {
        **{"backend": LocalSpecProvider(), "num_experts": 8, "num_layers": 2},
        "config": TransformerConfig(**SIZES, moe_ffn_hidden_size=16, mtp_num_layers=1),
        **dict.fromkeys(("spec", "mtp_model_layer_spec"), LAYER),
        **dict.fromkeys(("use_transformer_engine", "use_te"), False),
        **{"vp_stage": None, "pp_rank": 0},
    }
    (root,) = megatron.core.__path__
    for path in sorted(Path(root).rglob("*.py")):
        if not MODULE.fullmatch(path.stem):
            continue
        module = ".".join(("megatron.core", *path.relative_to(root).with_suffix("").parts))
        names: dict[str, Any] = {}
        # A module, or a function of it, may need a library that is not here.
        with suppress(Exception):
            names = vars(importlib.import_module(module))
        for name, value in names.items():
            if (
                inspect.isfunction(value)
                and value.__module__ == module
                and FUNCTION.fullmatch(name)
            ):
                taken = inspect.signature(inspect.unwrap(value)).parameters.keys() & given.keys()
                with suppress(Exception):
                    value = value(**{each: given[each] for each in taken})
            if isinstance(value, ModuleSpec | TransformerBlockSubmodules | list | partial):
                yield f"{module}.{name}", value


def num_layers(spec: Any, layer: str) -> int:
    """How often a class stands in a spec, by what it prints: found in another way than replaced."""
    return len(re.findall(rf"<class '[\w.<>]*\b{layer}'>", repr(spec)))


def test_every_spec_with_an_moe_layer_gets_our_dispatcher() -> None:
    found = ""
    for name, spec in specs():
        before, count = repr(spec), num_layers(spec, "MoELayer")
        if count == 0:
            with pytest.raises(ValueError, match="holds no MoELayer"):
                with_monta(spec)
            continue
        changed, found = with_monta(spec), f"{found} {name}"
        assert num_layers(changed, "MoELayer") == 0, name
        assert num_layers(changed, "MontaMoELayer") == count, name
        assert repr(spec) == before, name
        assert type(changed) is type(spec), name
    # Megatron's hybrid specs import Triton, which PyTorch's build for CPUs does not bring.
    hybrid = ("hybrid|mamba",) if importlib.util.find_spec("triton") else ()
    for part in ("block_spec", "layer_local_spec", "moe_module_spec", *hybrid):
        assert re.search(part, found), found


def test_a_named_tuple_in_a_spec_is_replaced() -> None:
    class Pair(NamedTuple):
        mlp: type
        number: int

    spec = ModuleSpec(module=object, params={"pair": Pair(MoELayer, 2)})
    assert with_monta(spec).params["pair"] == Pair(monta_moe_layer(), 2)
