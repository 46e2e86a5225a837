"""What is priced is what runs: kernels of a plan, and the range of its times."""

import pytest
from clusters import document, preset, shape_of

from monta_megatron.cli import main
from monta_megatron.planner.plan import plan

FLAGS = ["--world-size", "128", "--tp", "2", "--ep", "16", "--pp", "4"]


@pytest.mark.parametrize(
    ("cluster", "kernels", "priced"),
    [
        ("h100_8x_ndr", "auto", "fused"),
        ("h100_8x_ndr", "torch", "torch"),
        ("a800_2x8_ib200", "fused", "fused"),
        ("emulated_2x4_500mbit", "auto", "torch"),
    ],
)
def test_a_plan_says_which_kernels_it_prices(cluster: str, kernels: str, priced: str) -> None:
    found = plan(shape_of(8), preset(cluster).with_kernel_choice(kernels))  # type: ignore[arg-type]
    assert found.key.kernels == priced


def test_fused_kernels_are_refused_on_cpu_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "quickstart", "--cluster", "emulated_2x4_500mbit", "--ep", "8"]
    assert main([*command, "--kernels", "fused"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "kernels: got fused, must be auto or torch: the ranks of emulated 2x4" in line


def test_times_are_ranges_where_figures_are_published(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "qwen3_235b_a22b", "--cluster", "h100_8x_ndr", *FLAGS]
    planned = document(capsys, *command)
    low, high = planned["range_us"]
    assert low < planned["predicted_us"] < high
    low, high = planned["benefit"]["ratio_range"]
    assert low <= planned["benefit"]["ratio"] <= high
    best = {entry["chain"]: entry for entry in reversed(planned["candidates"])}
    for entry in best.values():
        assert entry["range_us"][0] <= entry["predicted_us"] <= entry["range_us"][1]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f": {planned['predicted_us']:,.0f} (" in shown
    assert max(map(len, shown.splitlines())) <= 80
