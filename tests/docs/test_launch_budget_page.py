"""docs/launch_budget.md is what the host issues now; a change of a count is seen there."""

import json
import subprocess
import sys

import pytest
from pages import REPOSITORY, check_current

pytest.importorskip("megatron.core", reason="needs megatron-core")

SCRIPT = REPOSITORY / "scripts" / "launch_budget.py"
PAGE = REPOSITORY / "docs" / "launch_budget.md"
COUNTS = ("tensor_operations", "kernel_launches", "collectives", "stream_switches", "waits")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=280
    )


def test_the_page_is_current() -> None:
    check_current(PAGE, SCRIPT, "--table")


def test_the_total_is_that_of_the_page() -> None:
    printed = run("--ep", "16", "--chain", "alltoall_dedup", "--num-chunks", "4", "--json")
    assert printed.returncode == 0, printed.stderr
    budget = json.loads(printed.stdout)
    total = [budget["total"][name] for name in COUNTS]
    line = " | ".join(map(str, ["| `alltoall_dedup`", 16, 4, *total]))
    assert f"{line} |" in PAGE.read_text(encoding="utf-8")
    assert all(each["host_us"] > 0 for each in budget["passes"])


def test_the_longest_chain_keeps_within_its_budget() -> None:
    """On the page, which is current."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith(
            ("| `hierarchical_alltoall` | 16 | 4 |", "| `hierarchical_alltoall` | 64 | 4 |")
        ):
            assert int(line.split(" | ")[3]) <= 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fused",), "--fused, got true, there are no fused kernels yet; leave it out"),
        (
            ("--chain", "alltoall", "--num-chunks", "4"),
            "--num-chunks, got 4, must be 1 to 1 for alltoall",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(arguments: tuple[str, ...], message: str) -> None:
    refused = run(*arguments)
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr == f"monta: error: {message}\n"
