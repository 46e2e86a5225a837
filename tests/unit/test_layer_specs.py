"""`with_monta` on every spec that the installed Megatron has."""

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

import megatron.core
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from monta_megatron.integration.layer import monta_moe_layer, with_monta

pytestmark = pytest.mark.old_end

NAME = re.compile(r"(?!_)\w*_spec(s|_for_backend)?(_\w+)?")


def config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_ffn_hidden_size=16,
        mtp_num_layers=1,
    )


def backend() -> Any:
    from megatron.core.models.backends import LocalSpecProvider

    return LocalSpecProvider()


def layer_spec() -> ModuleSpec:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False)


# What a function that makes a spec is given, by the name of its argument.
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "backend": backend,
    "config": config,
    "num_experts": lambda: 8,
    "num_layers": lambda: 2,
    "spec": layer_spec,
    "mtp_model_layer_spec": layer_spec,
    "use_transformer_engine": lambda: False,
    "use_te": lambda: False,
    "vp_stage": lambda: None,
    "pp_rank": lambda: 0,
}


def modules_with_specs() -> Iterator[Any]:
    """Every module of Megatron-Core whose name says that it holds specs."""
    (root,) = megatron.core.__path__
    for path in sorted(Path(root).rglob("*.py")):
        if re.search(r"_specs?$|^multi_token_prediction$", path.stem):
            name = ".".join(("megatron.core", *path.relative_to(root).with_suffix("").parts))
            try:
                yield importlib.import_module(name)
            except Exception:  # noqa: BLE001 - it may need a library that is not here
                continue


def specs() -> Iterator[tuple[str, Any]]:
    """Name and value of every spec, and of what every function that makes one returns."""
    for module in modules_with_specs():
        for name, value in vars(module).items():
            label = f"{module.__name__}.{name}"
            if isinstance(value, ModuleSpec):
                yield label, value
            elif inspect.isfunction(value) and NAME.fullmatch(name):
                if value.__module__ != module.__name__:
                    continue
                parameters = inspect.signature(inspect.unwrap(value)).parameters
                given = {each: ARGUMENTS[each]() for each in parameters if each in ARGUMENTS}
                try:
                    made = value(**given)
                except Exception:  # noqa: BLE001 - Transformer Engine or Apex may be missing
                    continue
                if isinstance(made, ModuleSpec | TransformerBlockSubmodules | list | partial):
                    yield f"{label}()", made


def num_layers(spec: Any, layer: str) -> int:
    """How often a class stands in a spec, by what it prints: found in another way than replaced."""
    return len(re.findall(rf"<class '[\w.<>]*\b{layer}'>", repr(spec)))


@pytest.fixture(scope="module")
def all_specs() -> dict[str, Any]:
    return dict(specs())


def test_every_spec_with_an_moe_layer_gets_our_dispatcher(all_specs: dict[str, Any]) -> None:
    changed = {}
    for name, spec in all_specs.items():
        before, count = repr(spec), num_layers(spec, "MoELayer")
        if count == 0:
            with pytest.raises(ValueError, match="holds no MoELayer"):
                with_monta(spec)
            continue
        changed[name] = with_monta(spec)
        assert num_layers(changed[name], "MoELayer") == 0, name
        assert num_layers(changed[name], "MontaMoELayer") == count, name
        assert repr(spec) == before, name
        assert type(changed[name]) is type(spec), name
    found = " ".join(changed)
    # Megatron's hybrid specs import Triton, which PyTorch's build for CPUs does not bring.
    hybrid = ("hybrid|mamba",) if importlib.util.find_spec("triton") else ()
    for part in ("block_spec", "layer_local_spec", "moe_module_spec", *hybrid):
        assert re.search(part, found), found


def test_what_holds_no_moe_layer_is_shared() -> None:
    spec = layer_spec()
    changed = with_monta(spec)
    assert changed.submodules.self_attention is spec.submodules.self_attention
    assert changed.submodules is not spec.submodules


def test_a_named_tuple_in_a_spec_is_replaced() -> None:
    class Pair(NamedTuple):
        mlp: type
        number: int

    spec = ModuleSpec(module=object, params={"pair": Pair(MoELayer, 2)})
    assert with_monta(spec).params["pair"] == Pair(monta_moe_layer(), 2)
