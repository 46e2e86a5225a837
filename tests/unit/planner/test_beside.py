"""Overlapped computation: exposed times are ranked, and how long they are."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import preset, workload_of

from monta_megatron.chains import CHAINS
from monta_megatron.cli import main
from monta_megatron.planner.chain_price import ChainPrice, price_chain
from monta_megatron.planner.cluster import Cluster, Contention
from monta_megatron.planner.plan import Plan, plan
from monta_megatron.planner.select import select_chain

# Nothing slows the work beside the exchange.
H100 = replace(
    preset("h100_8x_ndr"),
    contention=tuple(
        entry for entry in preset("h100_8x_ndr").contention if "compute" not in entry.pair
    ),
)
# More than any exchange here takes.
HUGE_US = 1e7
TWO_NODES = workload_of(16, tokens=2048, num_experts=128)


def around_us(price: ChainPrice) -> float:
    """What nothing hides: the host's own time, and what runs before and after the programs."""
    return sum(pass_.total_us - pass_.schedule.total_us for pass_ in price.passes)


def with_compute_factor(cluster: Cluster, factor: float) -> Cluster:
    """Other work and the network slow each other."""
    entry = Contention(pair=("compute", "inter"), factor=factor, kind="measured", source="a test")
    return replace(cluster, contention=(*cluster.contention, entry))


@pytest.mark.parametrize("workload", [TWO_NODES, workload_of(8), workload_of(4, 2, tokens=64)])
def test_without_other_work_everything_is_left_over(workload: object) -> None:
    planned = plan(workload, H100)  # type: ignore[arg-type]
    assert planned == plan(workload, H100, overlapped_compute_us=0.0)  # type: ignore[arg-type]
    assert planned.exposed_us == planned.predicted_us
    for candidate in planned.candidates:
        assert candidate.exposed_us == candidate.predicted_us


@pytest.mark.parametrize("overlapped_compute_us", [100.0, 2_000.0, 6_000.0, HUGE_US])
def test_each_pass_has_its_part_of_the_other_work_beside_it(overlapped_compute_us: float) -> None:
    """Four passes, of which the work hides as much of each program as a quarter of it takes."""
    for chain in CHAINS.values():
        alone = price_chain(TWO_NODES, H100, chain, 1, "forward_backward")
        price = price_chain(
            TWO_NODES, H100, chain, 1, "forward_backward", None, overlapped_compute_us
        )
        left_us = [
            max(each.schedule.total_us - overlapped_compute_us / 4, 0.0) for each in alone.passes
        ]
        assert price.exposed_us == pytest.approx(around_us(alone) + sum(left_us), abs=1e-4)
        assert price.total_us == pytest.approx(alone.total_us)


def test_of_what_is_hidden_alike_the_plainer_is_chosen() -> None:
    selection = select_chain(TWO_NODES, H100, overlapped_compute_us=HUGE_US)
    least_us = min(price.exposed_us for price in selection.prices)
    assert least_us == pytest.approx(min(map(around_us, selection.prices)))
    near = [price for price in selection.prices if price.exposed_us <= 1.03 * least_us]
    assert len({price.chain.name for price in near}) > 1
    assert selection.price.plainness == min(price.plainness for price in near)
    assert select_chain(TWO_NODES, H100).price.chain is not selection.price.chain


def test_what_slows_other_work_is_left_over() -> None:
    """At a factor of 2 other work gets nothing done while the network runs for as long as alone."""
    cluster = with_compute_factor(H100, 2.0)
    chain = CHAINS["alltoall_dedup"]
    price = price_chain(TWO_NODES, cluster, chain, 1, "forward", None, HUGE_US)
    network_us = [
        sum(sum(work.times_us) for work in each.pipeline if work.resource == "inter")
        for each in price_chain(TWO_NODES, H100, chain, 1, "forward").passes
    ]
    # Each runs at half its rate for twice the network's time.
    assert price.exposed_us == pytest.approx(around_us(price) + sum(network_us), abs=1e-3)
    # So a chain that needs the network least is chosen, though all of each is hidden.
    selection = select_chain(TWO_NODES, cluster, overlapped_compute_us=HUGE_US)
    assert selection.price.chain.name.startswith("hierarchical_")


def test_a_plan_says_beside_what_it_was_made(tmp_path: Path) -> None:
    planned = plan(TWO_NODES, H100, overlapped_compute_us=2_000.0)
    assert planned.key.overlapped_compute_us == 2_000.0
    assert planned.exposed_us is not None and planned.predicted_us is not None
    assert planned.exposed_us < planned.predicted_us
    assert planned.reason.startswith(
        f"exposes {planned.exposed_us:,.0f} of {planned.predicted_us:,.0f} us; "
    )
    assert planned.benefit is None
    planned.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == planned


def test_the_command_ranks_by_what_is_left_over(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--model qwen3_235b_a22b --cluster h100_8x_ndr --world-size 128 --tp 2 --ep 16 --pp 4"
    command = ["plan", *flags.split(), "--overlapped-compute-us", "1e5"]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    exposed_us = [
        candidate["exposed_us"]
        for candidate in document["candidates"]
        if candidate["exposed_us"] is not None
    ]
    assert exposed_us == sorted(exposed_us)
    assert document["key"]["overlapped_compute_us"] == 1e5
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("exposed ") for line in lines)
    assert any("exposed     inter" in line for line in lines)
