"""The ways into Megatron, each in a fresh process: what is hooked, and what is never broken."""

import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from preloaded import Preloaded

PYTHON_LIMIT_S = 120


def build(**options: object) -> object:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=4,
        expert_model_parallel_size=2,
        moe_token_dispatcher_type="monta",
        **options,
    )


def build_with(options: dict[str, object]) -> None:
    build(**options)


# Says what Megatron makes of the dispatcher type, and can build a configuration.
BUILD = f"""
import dataclasses
from megatron.core.transformer.transformer_config import TransformerConfig
{inspect.getsource(build)}
field = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
print("choice" if "monta" in str(field.type) else "unknown")
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True,
        text=True,
        timeout=PYTHON_LIMIT_S,
    )


def succeeds(code: str, **environment: str) -> str:
    result = python(code, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.old_end
def test_installed_is_enough_and_environment_variables_are_defaults() -> None:
    code = """
c = build()
print(c.moe_token_dispatcher_type, c.moe_monta_num_chunks)
print(dataclasses.asdict(c)["moe_monta_chain"], build(moe_monta_num_chunks=2).moe_monta_num_chunks)
"""
    environment = {"MOE_MONTA_NUM_CHUNKS": "7", "MOE_MONTA_CHAIN": "alltoall_allgather"}
    assert succeeds(BUILD + code, **environment) == "choice\nmonta 7\nalltoall_allgather 2"


def test_switched_off() -> None:
    assert succeeds(BUILD, MONTA_AUTOLOAD="0") == "unknown"


@pytest.mark.old_end
@pytest.mark.parametrize("before", [True, False])
def test_register_before_or_after_megatron_is_imported(before: bool) -> None:
    call = "import monta_megatron; monta_megatron.register(); monta_megatron.register()\n"
    megatron = "import megatron.core.transformer.transformer_config\n"
    code = (call if before else megatron + call) + BUILD + "build(moe_monta_num_chunks=2)"
    assert succeeds(code, MONTA_AUTOLOAD="0") == "choice"


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = """
        import sys, monta_megatron
        heavy = {"torch", "numpy", "matplotlib", "megatron"}
        print(sorted(heavy & set(sys.modules)))
    """
    assert succeeds(code) == "[]"


def test_importing_torch_imports_no_megatron() -> None:
    code = "import sys, torch; print([n for n in sys.modules if n.startswith('megatron')])"
    assert succeeds(code) == "[]"


@pytest.mark.old_end
def test_every_patch_is_a_function() -> None:
    code = """
        import pkgutil
        from monta_megatron.integration.registration import PATCHES
        for _, name in PATCHES:
            print(callable(pkgutil.resolve_name(f"monta_megatron.integration.{name}")))
    """
    lines = succeeds(code).splitlines()
    assert lines and set(lines) == {"True"}


def test_the_list_of_changes_to_megatron_is_complete() -> None:
    """Every function of ours that stands in a module or class of Megatron's is in the list."""
    code = """
        import contextlib, importlib, sys, monta_megatron
        from monta_megatron.integration import experts, optimizer_steps, registration
        monta_megatron.register()
        import megatron.core.optimizer
        from megatron.core.transformer.moe.moe_layer import MoELayer
        for name, _ in registration.PATCHES:
            # Which of the modules there are depends on the release.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        optimizer_steps.call_at_steps(print)
        experts._patch_layer(MoELayer)
        ours = set()
        for module in [each for name, each in sys.modules.items() if name.startswith("megatron.")]:
            owners = [module, *(each for each in vars(module).values() if isinstance(each, type))]
            for owner in owners:
                for name, value in list(vars(owner).items()):
                    written = getattr(getattr(value, "__func__", value), "__code__", None)
                    if written and "monta_megatron/integration" in written.co_filename:
                        ours.add(name)
        print(sorted(ours), [name for name in ours if name not in registration.__doc__])
    """
    changed = (
        "['__call__', '__init__', '__init_subclass__', '__post_init__', 'routed_experts_compute'"
    )
    assert succeeds(code) == f"{changed}, 'should_free_input', 'step', 'validate_args'] []"


def broken_megatron(folder: Path) -> str:
    """A folder whose `megatron` cannot be imported."""
    package = folder / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('broken on purpose')\n")
    return str(folder)


def test_torch_works_beside_a_broken_megatron(tmp_path: Path) -> None:
    code = """
        import torch, monta_megatron
        try:
            import megatron.core.transformer.transformer_config
        except RuntimeError as error:
            print(torch.ones(2).sum().item(), error)
    """
    path = broken_megatron(tmp_path)
    assert succeeds(code, PYTHONPATH=path) == "2.0 broken on purpose"


def test_torch_works_without_megatron() -> None:
    code = """
        import sys
        sys.modules["megatron"] = None
        import torch, monta_megatron
        try:
            monta_megatron.register()
        except ImportError as error:
            print("no Megatron")
    """
    assert succeeds(code) == "no Megatron"


def test_torch_works_when_the_hook_itself_fails() -> None:
    code = """
        import sys
        sys.modules["monta_megatron.integration.registration"] = None
        import torch
        print(torch.ones(2).sum().item())
    """
    result = python(code)
    assert result.stdout.strip() == "2.0", result.stderr
    assert "monta: not active" in result.stderr


def test_a_megatron_of_another_shape_stays_usable(tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "core" / "transformer"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "transformer_config.py").write_text("class SomethingElse: ...\n")
    code = "import torch\nfrom megatron.core.transformer.transformer_config import SomethingElse"
    result = python(code, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "moe_token_dispatcher_type='monta' is not available" in result.stderr


@pytest.fixture(scope="module")
def configurations() -> Iterator[Preloaded]:
    """Builds configurations."""
    megatron = Preloaded("megatron.core.transformer.transformer_config")
    yield megatron
    megatron.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"moe_monta_chain": "alltoal_allgather"}, ["moe_monta_chain", "did you mean"]),
        ({"moe_monta_chain": ["alltoall"]}, ["moe_monta_chain: got ['alltoall']", "a name"]),
        ({"moe_monta_cluster": 7}, ["moe_monta_cluster: got 7", "a file"]),
        ({"moe_monta_num_chunks": 2.5}, ["moe_monta_num_chunks", "got 2.5"]),
        ({"overlap_dispatch_backward_with_experts_wgrad": True}, ["not supported with"]),
        (
            {"moe_monta_chain": "alltoall_dedup", "expert_tensor_parallel_size": 2},
            ["moe_monta_chain: alltoall_dedup cannot run here", "expert_tensor_parallel_size is 2"],
        ),
        # Without a size of its own it is that of tensor parallelism.
        (
            {"moe_monta_chain": "hierarchical_alltoall", "tensor_model_parallel_size": 2},
            ["moe_monta_chain: hierarchical_alltoall cannot run", "alltoall_allgather"],
        ),
    ],
    ids=lambda value: str(value).strip("{}") if isinstance(value, dict) else "refused",
)
def test_bad_options_in_code_are_value_errors(
    configurations: Preloaded, options: dict[str, object], words: list[str]
) -> None:
    result = configurations.run(build_with, options)
    assert result.returncode == 1
    if "unexpected keyword argument 'overlap_dispatch_backward" in result.stderr:
        pytest.skip("needs Megatron-Core >= 0.18, which has the setting")
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ValueError: ")
    for word in words:
        assert word in last_line
