"""Every comparison of the dispatcher type in the installed Megatron is in the table.

sees "alltoall"   the string is replaced for the time of the call: what holds for the stock
                  alltoall dispatcher holds for ours, which is a subclass of it
sees "monta"      the comparison may see the real string; the reason says why that is right
answered          the function is wrapped, and our answer replaces Megatron's
"""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import pytest

from monta_megatron.integration.arguments import patch_should_free_input

pytestmark = pytest.mark.old_end

FIELD = "moe_token_dispatcher_type"


class Comparison(NamedTuple):
    """A function of Megatron that compares the dispatcher type."""

    module: str
    function: str
    sees: Literal["alltoall", "monta", "answered"]
    reason: str


COMPARISONS = (
    Comparison(
        "megatron.core.transformer.transformer_config",
        "TransformerConfig.__post_init__",
        "alltoall",
        "its checks of shared-expert overlap, router padding, variable sequence lengths, 1F1B "
        "overlap, CUDA graphs and batch invariance hold for a subclass of the dispatcher",
    ),
    Comparison(
        "megatron.core.transformer.moe.moe_layer",
        "MoELayer.__init__",
        "alltoall",
        "the stock dispatcher that it builds is replaced by ours before anyone uses it",
    ),
    Comparison(
        "megatron.core.transformer.moe.moe_layer",
        "MoELayer._setup_inference_mode",
        "alltoall",
        "part of the constructor above (0.17)",
    ),
    Comparison(
        "megatron.core.models.common.utils",
        "should_free_input",
        "answered",
        "our token_dispatch leaves rows in expert order, so the experts' input is the dispatched "
        "tensor itself and has to outlive the forward pass",
    ),
    Comparison(
        "megatron.core.models.gpt.fine_grained_callables",
        "should_free_input",
        "answered",
        "where megatron-core 0.16 keeps the function above",
    ),
    Comparison(
        "megatron.core.models.gpt.fine_grained_callables",
        "build_transformer_layer_callables",
        "monta",
        "asks only whether it is the flex dispatcher",
    ),
    Comparison(
        "megatron.core.transformer.transformer_layer",
        "TransformerLayer.__init__.can_recompute_pre_mlp_layernorm_for_cudagraph",
        "monta",
        "refuses the recomputation under CUDA graphs and says so: safe, and it is a nested "
        "function that cannot be reached from outside",
    ),
    Comparison(
        "megatron.core.transformer.moe.moe_utils",
        "skip_routed_expert_padding",
        "monta",
        "asks only whether it is the flex dispatcher",
    ),
    Comparison(
        "megatron.core.transformer.moe.moe_utils",
        "_deepep_permute_pads_grouped_tensor_input",
        "monta",
        "asks only whether it is the flex dispatcher (after 0.19)",
    ),
    Comparison(
        "megatron.core.transformer.moe.router",
        "TopKRouter.routing",
        "monta",
        "asks only whether it is the flex dispatcher (branch dev)",
    ),
    Comparison(
        "megatron.training.arguments",
        "validate_args",
        "monta",
        "asks only whether it is the flex dispatcher",
    ),
)


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
    listed = {(each.module, each.function) for each in COMPARISONS}
    found = {
        (module, function): text
        for module, source in megatron_sources()
        for function, text in comparisons(source)
    }
    assert found, "no comparison found: the search itself is broken"
    unknown = {place: text for place, text in found.items() if place not in listed}
    assert not unknown, f"Megatron compares {FIELD} in new places: {unknown}"


@pytest.mark.parametrize(
    "source",
    [
        "def f(c):\n    return c.moe_token_dispatcher_type == 'flex'",
        "def f(c):\n    return 'x' in (c.moe_token_dispatcher_type,)",
        "def f(c):\n    return getattr(c, 'moe_token_dispatcher_type') != 'alltoall'",
        "def f(c):\n    match c.moe_token_dispatcher_type:\n        case 'a': pass",
    ],
)
def test_a_new_comparison_is_found(source: str) -> None:
    assert [function for function, _ in comparisons(source)] == ["f"]


def test_the_inference_dispatcher_is_another_field() -> None:
    source = "def f(c):\n    return c.inference_moe_token_dispatcher_type == 'nvls'"
    assert list(comparisons(source)) == []


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
