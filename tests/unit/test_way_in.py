"""The ways into Megatron, each in a fresh process: what is hooked, and what is never broken."""

import ast
import inspect
from contextlib import closing
from pathlib import Path

import golden
import pytest
from preloaded import Preloaded
from run_python import run_python


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
    # The hook itself fails.
    "torch works without the hook": (
        "sys.modules['monta_megatron.integration.registration'] = None\n"
        "import torch, monta_megatron; print(torch.ones(2).sum().item())",
        {},
        "2.0",
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
    assert ("monta: not active" in result.stderr) == (name == "torch works without the hook")


@pytest.mark.parametrize(
    ("package", "source", "printed", "said"),
    [
        ("core", "raise RuntimeError('broken')", "broken\n2.0\n", ""),
        ("core/transformer", "", "2.0\n", "moe_token_dispatcher_type='monta' is not available"),
    ],
)
def test_torch_works_whatever_megatron_is(
    tmp_path: Path, package: str, source: str, printed: str, said: str
) -> None:
    folder = tmp_path / "megatron" / package
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text(source)
    (folder / "transformer_config.py").touch()
    code = f"try: {MEGATRON}except RuntimeError as error: print(error)\n"
    program = f"import torch, monta_megatron\n{code}print(torch.ones(2).sum().item())"
    result = run_python("-c", program, PYTHONPATH=str(tmp_path))
    assert result.stdout == printed and said in result.stderr, result.stderr


def test_bad_options_in_code_are_user_errors() -> None:
    def answer(options: str) -> str:
        result = process.run(build, ast.literal_eval(options))
        assert result.returncode == 1
        last_line = result.stderr.splitlines()[-1]
        kind, _, line = last_line.partition(": ")
        assert kind == "monta_megatron.common.errors.UserError"
        return line

    with closing(Preloaded("megatron.core.transformer.transformer_config")) as process:
        golden.check_cases(Path(__file__).parent / "golden" / "options_in_code.txt", answer)
