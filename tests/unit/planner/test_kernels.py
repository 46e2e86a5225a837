"""What is priced is what runs: kernels of a plan, and stock's other dispatcher beside it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import preset, workload_of
from monta_megatron.planner.flex import predict_flex, why_not

from monta_megatron.chains.layout import Layout
from monta_megatron.cli import main
from monta_megatron.planner.plan import Plan, plan

FLAGS = (
    "--model",
    "qwen3_235b_a22b",
    "--world-size",
    "128",
    "--tp",
    "2",
    "--ep",
    "16",
    "--pp",
    "4",
)
H100 = preset("h100_8x_ndr")


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
    found = plan(workload_of(8), preset(cluster).with_kernel_choice(kernels))  # type: ignore[arg-type]
    assert found.key.kernels == priced


def test_fused_kernels_are_refused_on_cpu_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "quickstart", "--cluster", "emulated_2x4_500mbit", "--ep", "8"]
    assert main([*command, "--kernels", "fused"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "kernels: got fused, must be auto or torch: the ranks of emulated 2x4" in line


def test_a_plan_of_other_kernels_is_refused_in_one_line(tmp_path: Path) -> None:
    found = plan(workload_of(16), H100)
    assert found.incompatibility({"kernels": "fused"}) is None
    assert found.incompatibility({"kernels": "torch"}) == (
        "key.kernels: the plan is for fused, used with torch; make one for this model, batch and "
        "layout with `monta plan --kernels torch`"
    )
    # Files of before say nothing.
    path = tmp_path / "plan.yaml"
    found.save(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if "kernels:" not in line))
    old = Plan.load(path)
    assert old.key.kernels is None and old.incompatibility({"kernels": "torch"}) is None


def test_times_are_ranges_where_figures_are_published(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--cluster", "h100_8x_ndr", *FLAGS]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    low, high = document["range_us"]
    assert low < document["predicted_us"] < high
    low, high = document["benefit"]["ratio_range"]
    assert low <= document["benefit"]["ratio"] <= high
    best = {entry["chain"]: entry for entry in reversed(document["candidates"])}
    for entry in best.values():
        assert entry["range_us"][0] <= entry["predicted_us"] <= entry["range_us"][1]
    backends = {entry["backend"]: entry for entry in document["flex"]}
    assert backends["deepep"]["predicted_us"] > 0 and backends["ncclep"]["predicted_us"] is None
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f": {document['predicted_us']:,.0f} (" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_measured_times_are_points() -> None:
    launch = replace(H100.launch, conservative_speed=None, optimistic_speed=None)
    links = tuple(
        replace(link, conservative_rate=None, optimistic_rate=None) for link in H100.links
    )
    measured = replace(H100, launch=launch, links=links)
    assert measured.ends is None
    assert predict_flex(workload_of(16), measured, "forward")[0].range_us is None


def layout(num_nodes: int, ranks_per_node: int) -> Layout:
    nodes = tuple(node for node in range(num_nodes) for _ in range(ranks_per_node))
    return Layout(ep=len(nodes), etp=1, num_local_experts=1, rank=0, nodes=nodes)


@pytest.mark.parametrize(
    ("backend", "cluster", "num_nodes", "ranks_per_node", "words"),
    [
        ("deepep", "h100_8x_ndr", 2, 8, None),
        ("hybridep", "h100_8x_ndr", 2, 8, None),
        ("deepep", "a800_2x8_ib200", 1, 8, None),
        ("deepep", "a800_2x8_ib200", 2, 8, "no kernels between nodes for Ampere"),
        ("hybridep", "a800_2x8_ib200", 1, 8, "Hopper"),
        ("deepep", "h100_efa_p5", 2, 8, "IBGDA"),
        ("hybridep", "h100_efa_p5", 1, 8, None),
        ("deepep", "gb200_nvl72", 1, 64, "at most 8 ranks"),
        ("hybridep", "gb200_nvl72", 1, 64, None),
        ("deepep", "h100_8x_ndr", 2, 4, "needs 8 ranks on each"),
        ("deepep", "h100_8x_ndr", 32, 8, "at most 20 nodes"),
        ("deepep", "a100_pcie_hdr", 1, 8, "needs NVLink"),
        ("deepep", "emulated_2x4_500mbit", 2, 4, "needs GPUs"),
    ],
)
def test_a_backend_that_does_not_run_says_why(
    backend: str, cluster: str, num_nodes: int, ranks_per_node: int, words: str | None
) -> None:
    reason = why_not(backend, layout(num_nodes, ranks_per_node), preset(cluster))  # type: ignore[arg-type]
    assert reason is None if words is None else words in str(reason)
