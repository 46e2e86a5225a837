"""What a budget of CTAs does to the node link's price, and what is said of another budget."""

import json
from dataclasses import replace
from typing import Any

import pytest
from clusters import workload_of

from monta_megatron.chains.layout import DEFAULT_CTAS, Ctas
from monta_megatron.cli import main
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.curves import Curve
from monta_megatron.planner.plan import Plan, plan
from monta_megatron.tools.calibrate.record import ctas_of_environment


def preset() -> Cluster:
    return load_cluster("h100_8x_ndr")


# 335 GB/s of the link, 23 GB/s of a CTA: 8 carry 184 and 16 would carry 368.
@pytest.mark.parametrize(("ctas", "gbytes_per_s"), ((1, 23), (8, 184), (14, 322), (16, 335)))
def test_the_node_link_has_the_rate_of_its_ctas(ctas: int, gbytes_per_s: float) -> None:
    cluster = preset().with_ctas(Ctas(rail=4, node=ctas))
    first, second = (cluster.time_us("alltoall", "intra", size, 8).us for size in (0.0, 1e9))
    assert second - first == pytest.approx(1e6 / gbytes_per_s)
    assert not cluster.doubts


def test_the_default_budget_is_what_is_priced() -> None:
    cluster = preset()
    assert cluster.ctas == DEFAULT_CTAS
    assert cluster.with_ctas(DEFAULT_CTAS) is cluster


def test_the_network_has_no_limit_by_ctas() -> None:
    cluster = preset()
    few = cluster.with_ctas(Ctas(rail=1, node=1))
    assert few.time_us("alltoall", "inter", 1e9, 2) == cluster.time_us("alltoall", "inter", 1e9, 2)


def test_curves_of_another_budget_are_a_doubt() -> None:
    curve = Curve(
        operation="alltoall",
        resource="intra",
        group_size=8,
        sizes_bytes=(1000, 1000000),
        times_us=(10.0, 20.0),
        kind="measured",
        source="test",
    )
    cluster = replace(preset(), curves=(curve,), node_ctas=16)
    # Of the rail nothing was measured.
    (doubt,) = cluster.with_ctas(Ctas(rail=2, node=8)).doubts
    assert doubt == "measured with 16 CTAs for a node, and 8 are given: calibrate again"
    assert not cluster.with_ctas(Ctas(rail=2, node=16)).doubts


LAYOUT = ["--world-size", "16", "--ep", "16", "--tokens", "2048", "--ignore-memory"]
COMMANDS = {
    "plan": [],
    "timeline": ["--alone"],
    "simulate": ["--sweep", "tokens=2048"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_price_the_budgets_that_they_are_given(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [command, "--model", "qwen3_235b_a22b", "--cluster", "h100_8x_ndr", *LAYOUT]
    words += [*COMMANDS[command], "--json"]

    def document(*flags: str) -> str:
        assert main([*words, *flags]) == 0
        return capsys.readouterr().out

    assert document() == document("--rail-ctas", "4", "--node-ctas", "16")
    assert document() != document("--node-ctas", "2")
    with pytest.raises(SystemExit):
        main([*words, "--node-ctas", "0"])
    assert "--node-ctas: got '0', must be an integer >= 1" in capsys.readouterr().err


def test_communicators_of_a_plan_hold_what_its_budgets_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """7 peers x CTAs x 12 MiB in the node, and CTAs x 4 MiB on the rail."""
    words = ["plan", "--model", "qwen3_235b_a22b", "--cluster", "h100_8x_ndr", *LAYOUT, "--json"]
    assert main([*words, "--rail-ctas", "2", "--node-ctas", "8"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["memory"]["communicator_bytes"] == (7 * 8 * 12 + 2 * 4) * 2**20
    assert (document["key"]["rail_ctas"], document["key"]["node_ctas"]) == (2, 8)


def test_a_plan_for_other_budgets_is_doubtful() -> None:
    planned = plan(workload_of(16), preset().with_ctas(Ctas(rail=2, node=16)))
    found = replace(planned, chain="hierarchical_alltoall", num_chunks=2)
    assert found.doubts_under(Ctas(rail=2, node=16)) == ()
    assert found.doubts_under(Ctas(rail=2, node=8)) == (
        "doubt: planned with 16 CTAs for a node, and 8 are given: plan again with --node-ctas 8",
    )
    # It has no communicators of its own, or the file does not say.
    assert replace(found, chain="alltoall", num_chunks=1).doubts_under(DEFAULT_CTAS) == ()
    silent: Plan = replace(found, key=replace(found.key, rail_ctas=None, node_ctas=None))
    assert silent.doubts_under(Ctas(rail=1, node=1)) == ()


def test_budgets_of_a_training_started_here() -> None:
    assert ctas_of_environment({}, {}) == DEFAULT_CTAS
    environ = {"MOE_MONTA_MAX_CTAS": "6", "MOE_MONTA_NODE_CTAS": "12"}
    assert ctas_of_environment({}, environ) == Ctas(rail=6, node=12)
    assert ctas_of_environment({"rail": 2, "node": None}, environ) == Ctas(rail=2, node=12)
    for text in ("0", "few", "2.5"):
        with pytest.raises(ValueError, match=r"^MOE_MONTA_RAIL_CTAS: got '.*', must be an integer"):
            ctas_of_environment({}, {"MOE_MONTA_RAIL_CTAS": text})
