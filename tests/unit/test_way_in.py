"""The ways into Megatron, each in a fresh process: what is hooked, and what is never broken."""

import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from preloaded import Preloaded
from run_python import run_python

from monta_megatron.integration.registration import PATCHES


def build(options: dict[str, object]) -> object:
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


# Says what Megatron makes of the dispatcher type, and can build a configuration.
BUILD = f"""
import dataclasses
from megatron.core.transformer.transformer_config import TransformerConfig
{inspect.getsource(build)}
field = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
print("choice" if "monta" in str(field.type) else "unknown")
"""


REGISTER = "import monta_megatron; monta_megatron.register(); monta_megatron.register()\n"
MEGATRON = "import megatron.core.transformer.transformer_config\n"
CHUNKS = 'build({"moe_monta_num_chunks": 2})'
OFF = {"MONTA_AUTOLOAD": "0"}
HEAVY = {"torch", "numpy", "matplotlib", "megatron"}
DEFAULTS = {"MOE_MONTA_NUM_CHUNKS": "7", "MOE_MONTA_CHAIN": "alltoall_allgather"}
# Every function of ours that stands in a module or class of Megatron's, and those that the list of
# changes leaves out.
CHANGES = """
import contextlib, importlib, monta_megatron
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
print(*sorted(ours), [name for name in ours if name not in registration.__doc__])
"""
CHANGED = "__call__ __init__ __init_subclass__ __post_init__ routed_experts_compute"
# In a fresh interpreter: what runs, its environment, what it prints.
PROGRAMS = {
    "installed is enough, and environment variables are defaults": (
        f"{BUILD}c = dataclasses.asdict(build({{}}))\n"
        f"print(c['moe_monta_chain'], c['moe_monta_num_chunks'], {CHUNKS}.moe_monta_num_chunks)",
        DEFAULTS,
        "choice alltoall_allgather 7 2",
    ),
    "switched off": (BUILD, OFF, "unknown"),
    "registered before Megatron is imported": (REGISTER + BUILD + CHUNKS, OFF, "choice"),
    "registered after Megatron is imported": (MEGATRON + REGISTER + BUILD + CHUNKS, OFF, "choice"),
    "the package imports nothing heavy": (
        f"import monta_megatron; print({HEAVY} & set(sys.modules))",
        {},
        "set()",
    ),
    "torch imports no Megatron": (
        "import torch; print([n for n in sys.modules if n.startswith('megatron')])",
        {},
        "[]",
    ),
    "the list of changes to Megatron is complete": (
        CHANGES,
        {},
        f"{CHANGED} should_free_input step validate_args []",
    ),
    "torch works without Megatron": (
        "sys.modules['megatron'] = None; import torch, monta_megatron\n"
        "try: monta_megatron.register()\nexcept ImportError: print('no Megatron')",
        {},
        "no Megatron",
    ),
}
ON_THE_OLDEST = [name for name in PROGRAMS if name.startswith(("installed", "registered"))]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.old_end) if name in ON_THE_OLDEST else name
        for name in PROGRAMS
    ],
)
def test_fresh_interpreter(name: str) -> None:
    code, environment, printed = PROGRAMS[name]
    result = run_python("-c", f"import sys\n{code}", **environment)
    assert (result.returncode, result.stdout.split()) == (0, printed.split()), result.stderr


@pytest.mark.old_end
def test_every_patch_is_a_function() -> None:
    for _, name in PATCHES:
        assert callable(pkgutil.resolve_name(f"monta_megatron.integration.{name}"))


@pytest.mark.parametrize(
    ("package", "source", "said"),
    [
        ("megatron/core", "raise RuntimeError('broken on purpose')", ""),
        ("megatron/core/transformer", "", "moe_token_dispatcher_type='monta' is not available"),
        # The hook itself fails.
        (None, "", "monta: not active"),
    ],
)
def test_torch_works_whatever_megatron_is(
    tmp_path: Path, package: str | None, source: str, said: str
) -> None:
    code, path = "", {}
    if package is None:
        code = "sys.modules['monta_megatron.integration.registration'] = None\n"
    else:
        folder, path = tmp_path / package, {"PYTHONPATH": str(tmp_path)}
        folder.mkdir(parents=True)
        for above in (folder, folder.parent):
            (above / "__init__.py").touch()
        (folder / "__init__.py").write_text(source)
        (folder / "transformer_config.py").touch()
    code += "import torch, monta_megatron\n"
    if package is not None:
        code += f"try: {MEGATRON}except RuntimeError as error: print(error)\n"
    program = f"import sys\n{code}print(torch.ones(2).sum().item())"
    result = run_python("-c", program, **path)
    assert result.stdout.split("\n")[-2] == "2.0", result.stderr
    assert said in result.stderr and ("on purpose" in source) == ("on purpose" in result.stdout)


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
    result = configurations.run(build, options)
    assert result.returncode == 1
    if "unexpected keyword argument 'overlap_dispatch_backward" in result.stderr:
        pytest.skip("needs Megatron-Core >= 0.18, which has the setting")
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ValueError: ")
    for word in words:
        assert word in last_line
