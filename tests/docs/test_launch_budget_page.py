"""docs/launch_budget.md is what the host issues now; a change of a count is seen there."""

import json
import subprocess
import sys

import pytest
from pages import REPOSITORY, check_current

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")

SCRIPT = REPOSITORY / "scripts" / "launch_budget.py"
PAGE = REPOSITORY / "docs" / "launch_budget.md"
COUNTS = ("tensor_operations", "kernel_launches", "collectives", "stream_switches", "waits")


# The script as it is started, where there is no pytest.
WITHOUT_PYTEST = """
import runpy, sys
sys.modules["pytest"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_PYTEST, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_the_page_is_current() -> None:
    check_current(PAGE, SCRIPT, "--table")


def test_the_total_is_that_of_the_page() -> None:
    printed = run("--ep", "16", "--chain", "alltoall_dedup", "--num-chunks", "4", "--json")
    assert printed.returncode == 0, printed.stderr
    budget = json.loads(printed.stdout)
    total = [budget["total"][name] for name in COUNTS]
    assert total == list(of_page("alltoall_dedup", 16, 4, "torch").values())
    assert all(each["host_us"] > 0 for each in budget["passes"])


def of_page(chain: str, ep: int, num_chunks: int, kernels: str) -> dict[str, int]:
    """The counts of a line of the page, which is current; a line may hold for several EP sizes."""
    wanted = [f"`{chain}`", str(num_chunks), kernels]
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    (numbers,) = (
        numbers
        for name, eps, *of, numbers in ([*line[:4], line[4:]] for line in lines if len(line) > 4)
        if [name, *of] == wanted and str(ep) in eps.split(", ")
    )
    return dict(zip(COUNTS, map(int, numbers), strict=True))


@pytest.mark.parametrize("ep", [16, 64])
def test_chains_keep_within_their_budgets(ep: int) -> None:
    longest = "hierarchical_alltoall"
    assert of_page(longest, ep, 4, "torch")["tensor_operations"] <= 400
    fused = of_page(longest, ep, 4, "fused")
    assert fused["kernel_launches"] <= 120 and fused["collectives"] == 33
    assert of_page("alltoall_dedup", ep, 4, "fused")["kernel_launches"] <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
