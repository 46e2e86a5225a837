"""The planner needs numpy and yaml alone."""

import subprocess
import sys
import textwrap

from clusters import CONFIGS

WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "transformer_engine"):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Refuse())
from monta_megatron.cli import main
status = main(sys.argv[1:])
assert "torch" not in sys.modules and "megatron" not in sys.modules
sys.exit(status)
"""


def run_without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_TORCH), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_plan_is_made_without_torch() -> None:
    result = run_without_torch(
        "plan",
        "--model",
        str(CONFIGS / "models" / "mixtral_8x7b.yaml"),
        "--cluster",
        str(CONFIGS / "clusters" / "a800_2x8_ib200.yaml"),
        "--ep",
        "8",
    )
    assert result.returncode == 0, result.stderr
    assert "choice" in result.stdout


def test_help_is_there_without_torch() -> None:
    result = run_without_torch("plan", "--help")
    assert result.returncode == 0, result.stderr
    assert "examples:" in result.stdout
