"""Every comparison of the dispatcher type in the installed Megatron is in the table."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from monta_megatron.integration.arguments import patch_should_free_input

pytestmark = pytest.mark.old_end

FIELD = "moe_token_dispatcher_type"
# Why each may stay -> module and function of Megatron.
COMPARISONS = {
    # Replaced for the time of the call: it checks shared-expert overlap, router padding, variable
    # sequence lengths, 1F1B overlap, CUDA graphs and batch invariance, which a subclass takes too;
    # or it builds the stock dispatcher that ours replaces before anyone uses it.
    'sees "alltoall"': (
        "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
        "megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
        "megatron.core.transformer.moe.moe_layer:MoELayer._setup_inference_mode",
    ),
    # Our token_dispatch leaves rows in expert order, so the experts' input is the dispatched tensor
    # itself and outlives the forward pass. In 0.16 the function is in the second module.
    "wrapped, and our answer replaces Megatron's": (
        "megatron.core.models.common.utils:should_free_input",
        "megatron.core.models.gpt.fine_grained_callables:should_free_input",
    ),
    "asks only whether it is the flex dispatcher": (
        "megatron.core.models.gpt.fine_grained_callables:build_transformer_layer_callables",
        "megatron.core.transformer.moe.moe_utils:skip_routed_expert_padding",
        "megatron.core.transformer.moe.moe_utils:_deepep_permute_pads_grouped_tensor_input",
        "megatron.core.transformer.moe.router:TopKRouter.routing",
        "megatron.training.arguments:validate_args",
    ),
    "refuses a recomputation under CUDA graphs, and says so": (
        "megatron.core.transformer.transformer_layer:"
        "TransformerLayer.__init__.can_recompute_pre_mlp_layernorm_for_cudagraph",
    ),
}


def comparisons(source: str) -> Iterator[tuple[str, str]]:
    """(qualified function, comparison) for everything that compares the field, or a name or
    string lookup that was assigned from it."""
    tree = ast.parse(source)

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*names, child.name)
            if isinstance(child, ast.Compare | ast.Match) and FIELD in operands(child):
                yield ".".join(inner), ast.unparse(child)
            yield from visit(child, inner)

    def operands(node: ast.Compare | ast.Match) -> str:
        values = [node.subject] if isinstance(node, ast.Match) else [node.left, *node.comparators]
        return " ".join(ast.unparse(value).replace(f"inference_{FIELD}", "") for value in values)

    return visit(tree, ())


def megatron_sources() -> Iterator[tuple[str, str]]:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations
    for root in spec.submodule_search_locations:
        for path in Path(root).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            if FIELD in source:
                module = ".".join(("megatron", *path.relative_to(root).with_suffix("").parts))
                yield module, source


def test_every_comparison_in_the_installed_megatron_is_listed() -> None:
    listed = {place for places in COMPARISONS.values() for place in places}
    found = {
        f"{module}:{function}": text
        for module, source in megatron_sources()
        for function, text in comparisons(source)
    }
    assert found, "no comparison found: the search itself is broken"
    unknown = {place: text for place, text in found.items() if place not in listed}
    assert not unknown, f"Megatron compares {FIELD} in new places: {unknown}"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return c.moe_token_dispatcher_type == 'flex'", ["f"]),
        ("return 'x' in (c.moe_token_dispatcher_type,)", ["f"]),
        ("return getattr(c, 'moe_token_dispatcher_type') != 'alltoall'", ["f"]),
        ("match c.moe_token_dispatcher_type:\n        case 'a': pass", ["f"]),
        # Another field.
        ("return c.inference_moe_token_dispatcher_type == 'nvls'", []),
    ],
)
def test_a_new_comparison_is_found(body: str, found: list[str]) -> None:
    assert [function for function, _ in comparisons(f"def f(c):\n    {body}")] == found


def test_a_function_is_wrapped_once_where_it_is_defined() -> None:
    def should_free_input(*arguments: Any) -> bool:
        return True

    should_free_input.__module__ = "defines"
    modules = {name: ModuleType(name) for name in ("defines", "imports", "lacks")}
    for name in ("defines", "imports"):
        modules[name].__dict__["should_free_input"] = should_free_input
    for module in modules.values():
        patch_should_free_input(module)
    assert vars(modules["defines"])["should_free_input"].__wrapped__ is should_free_input
    assert vars(modules["imports"])["should_free_input"] is should_free_input
    assert "should_free_input" not in vars(modules["lacks"])
