"""A layer with its experts in the pipeline, as the planner sees it: when, how much, and whether."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import preset
from monta_megatron.planner.experts import Experts, ExpertSizes, experts_of, with_expert_curves
from monta_megatron.planner.layer_price import bound_layers, layer_peak_bytes

from monta_megatron.chains.layout import Layout
from monta_megatron.chains.program import Policy
from monta_megatron.planner.calibration.fitting import expert_curve, expert_points
from monta_megatron.planner.cluster import Cluster, Contention
from monta_megatron.planner.cluster_file import dump_measured, load_cluster
from monta_megatron.planner.plan import plan, plan_of
from monta_megatron.planner.routing.expected import UniformRouting
from monta_megatron.planner.schedule import Work, simulate
from monta_megatron.planner.select import select_chain
from monta_megatron.planner.workload import Workload

H100 = preset("h100_8x_ndr")
# 2 nodes of one rank: one exchange over the network in either pass.
LAYOUT = Layout(ep=2, etp=1, num_local_experts=2, rank=0, nodes=(0, 1))
SIZES = ExpertSizes(num_local_experts=2, hidden_size=4096, ffn_hidden_size=1024, value_bytes=2)


def experts_of_us(us: float, in_background: bool = False, rows: float = 8192.0) -> Experts:
    """So long for so many rows, forward and backward, in proportion to them."""
    return Experts(
        rows=(1.0, rows),
        forward_us=(us / rows, us),
        backward_us=(us / rows, us),
        launch_us=0.0,
        in_background=in_background,
        note="a test",
    )


def workload_with(experts: Experts | None, tokens: int = 4096) -> Workload:
    return Workload(
        layout=LAYOUT,
        hidden_size=4096,
        value_bytes=2,
        prob_bytes=4,
        routing=UniformRouting(num_experts=4, topk=2),
        tokens_per_rank=tokens,
        experts=experts,
    )


def total_us(num_chunks: int, expert_us: float, policy: Policy, in_background: bool) -> float:
    """Forward, where a chunk's exchange takes 10 us, its experts that long, and copies nothing."""
    workload = workload_with(experts_of_us(1, in_background))
    chain = next(
        price.chain
        for price in select_chain(workload, H100, phase="forward").prices
        if price.chain.name == "alltoall_dedup"
    )
    layer, *_ = bound_layers(workload, chain, num_chunks, LAYOUT, policy, "forward")
    times: Mapping[str, float] = {"inter": 10.0, "compute": expert_us}
    works = [
        Work(
            stage=series[0].stage,
            resource=series[0].resource,
            times_us=(times.get(series[0].resource, 0.0),) * num_chunks,
        )
        for series in layer.program.series
    ]

    def factor(first: str, second: str) -> float:
        return 2.0 if first == second else 1.0

    return simulate(layer.program.operations, works, factor).total_us


@pytest.mark.parametrize(
    ("num_chunks", "expert_us", "expected_us"),
    [
        # One after the other.
        (1, 30.0, 50.0),
        # The network is always busy: dispatch 0 1, combine 0 1.
        (2, 4.0, 40.0),
        # The experts are always busy, with a chunk's dispatch before and its combine behind them.
        (2, 30.0, 10.0 + 2 * 30.0 + 10.0),
        (4, 30.0, 10.0 + 4 * 30.0 + 10.0),
    ],
)
def test_a_layer_takes_its_busiest_resource_and_two_chunks(
    num_chunks: int, expert_us: float, expected_us: float
) -> None:
    assert total_us(num_chunks, expert_us, "streams", False) == pytest.approx(expected_us)


def test_experts_of_a_host_and_of_a_timer_hide_what_travels() -> None:
    # Gloo sends both chunks at once: dispatch 0 and 1 0-20; experts 0 20-50 and 1 50-80; combine 0
    # 50-60 and 1 80-90. With a timer the host goes on, but combine 0 has to wait for its experts.
    assert total_us(2, 30.0, "host", False) == pytest.approx(90.0)
    assert total_us(2, 30.0, "host", True) == pytest.approx(90.0)
    # Beside a timer the network is always busy; a host that computes sends a little later.
    assert total_us(4, 4.0, "host", True) == pytest.approx(80.0)
    assert 80.0 < total_us(4, 4.0, "host", False) < 80.0 + 4 * 4.0


def test_one_chunk_stays_where_splitting_gains_nothing() -> None:
    """A host takes longer to start several chunks of so few tokens than anything is hidden."""
    chosen = plan(workload_with(experts_of_us(0.001), tokens=64), H100)
    assert not chosen.experts_pipelined
    # The same choice as without the switch, and the same time but for the experts.
    alone = plan(workload_with(None, tokens=64), H100)
    assert (chosen.chain, chosen.num_chunks) == (alone.chain, alone.num_chunks)
    assert chosen.predicted_us == pytest.approx(alone.predicted_us, rel=1e-4)
    assert chosen.key.experts == "a test" and alone.key.experts is None
    assert chosen.benefit is None


def test_long_experts_are_split() -> None:
    alone = plan(workload_with(None), H100)
    assert alone.predicted_us is not None
    forward_us = alone.predicted_us / 2
    chosen = plan(workload_with(experts_of_us(forward_us)), H100)
    assert chosen.experts_pipelined and chosen.num_chunks > 1
    whole = min(
        entry.predicted_us or 0.0
        for entry in chosen.candidates
        if entry.predicted_us is not None and not entry.experts_pipelined
    )
    assert whole == pytest.approx(alone.predicted_us + 2 * forward_us, rel=0.05)
    assert chosen.predicted_us is not None and chosen.predicted_us < 0.9 * whole
    resources = {stage.resource for stage in chosen.stages}
    assert "compute" in resources and "inter" in resources


def test_contention_with_compute_makes_a_split_layer_slower() -> None:
    """What experts lose to collectives on the SMs is part of the price of a split layer alone."""

    def best_us(cluster: Cluster, pipelined: bool) -> float:
        prices = select_chain(workload_with(experts_of_us(3000.0)), cluster).prices
        return next(p.total_us for p in prices if p.experts_pipelined == pipelined)

    slow = replace(
        H100,
        contention=tuple(
            Contention(pair=("compute", resource), factor=2.0, kind="datasheet", source="a test")
            for resource in ("inter", "intra", "memory")
        ),
    )
    free = replace(H100, contention=())
    assert best_us(slow, True) > 1.05 * best_us(free, True)
    assert best_us(slow, False) == best_us(free, False)


def test_no_candidate_beats_its_lower_bound() -> None:
    for candidate in plan_of(select_chain(workload_with(experts_of_us(3000.0)), H100)).candidates:
        if candidate.predicted_us is not None and candidate.lower_bound_us is not None:
            assert candidate.lower_bound_us <= candidate.predicted_us * (1 + 1e-9), candidate


def test_liveness_is_at_most_two_chunks_above_the_unsplit_layer() -> None:
    workload = workload_with(experts_of_us(1.0))
    prices = [price for price in select_chain(workload, H100).prices if price.experts_pipelined]
    for chain in {price.chain.name: price.chain for price in prices}.values():
        peaks = {
            num_chunks: [
                layer_peak_bytes(layer)
                for layer in bound_layers(
                    workload, chain, num_chunks, LAYOUT, "streams", "forward_backward"
                )
            ]
            for num_chunks in (1, 4)
        }
        # 2 experts of each of 4,096 tokens of 2 ranks, half of them here, in 2 bytes
        chunk_bytes = 2 * 4096 * 4096 * 2 / 4
        for split, whole in zip(peaks[4], peaks[1], strict=True):
            assert split <= whole + 2 * chunk_bytes, chain.name


def test_experts_by_their_flops() -> None:
    """Many rows are bound by the FLOPs, few by the weights that are read whatever the rows."""
    experts = experts_of(SIZES, H100)
    rows = 2.0**20
    flops = 2 * 3 * rows * SIZES.hidden_size * SIZES.ffn_hidden_size
    us = flops / (989.4e6 * 0.717)
    # The activation function reads and writes memory besides.
    assert us < experts.time_us(rows) < 1.2 * us
    assert experts.time_us(rows, backward=True) == pytest.approx(2 * experts.time_us(rows))
    weights = 3 * SIZES.num_local_experts * SIZES.hidden_size * SIZES.ffn_hidden_size * 2
    assert experts.time_us(2.0) == pytest.approx(weights / 2475e3, rel=0.05)
    assert experts.time_us(0.0) == experts.time_us(2.0)
    assert "not measured" in experts.note and "H100" in experts.note


def test_the_gpu_that_a_training_runs_on_is_priced() -> None:
    of_a100 = experts_of(SIZES, H100, gpu="NVIDIA A100-SXM4-80GB")
    assert of_a100.time_us(1e6) > 2 * experts_of(SIZES, H100).time_us(1e6)
    # One that nobody knows counts as the one of the uncalibrated cluster.
    assert experts_of(SIZES, H100, gpu="a GPU").time_us(1e6) == experts_of(SIZES, H100).time_us(1e6)


def test_calls_that_were_timed_become_a_curve_that_is_used(tmp_path: Path) -> None:
    """A backward pass is what forward and backward take beyond forward; launches are apart."""
    points = expert_points(SIZES, "cpu")
    forward, both = points[: len(points) // 2], points[len(points) // 2 :]
    times_us = {point.name: 10.0 + 2 * point.num_rows for point in forward}
    times_us |= {point.name: 16.0 + 6 * point.num_rows for point in both}
    launches_us = {point.name: 4.0 for point in points}
    curve = expert_curve(SIZES, points, times_us, launches_us, "a test")
    assert curve.rows_per_expert == (1, 4, 16, 64) and curve.launch_us == 4.0
    cluster = replace(with_expert_curves(H100, [curve]), kind="measured")
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_measured(cluster))
    loaded = load_cluster(path)
    assert loaded == cluster
    experts = experts_of(SIZES, loaded)
    # 2 experts of 10 rows each, between those that were timed, and of more than any.
    assert experts.time_us(20.0) == pytest.approx(6.0 + 2 * 20)
    assert experts.time_us(20.0, backward=True) == pytest.approx(2.0 + 4 * 20)
    assert experts.time_us(1000.0) == pytest.approx(6.0 + 2 * 1000)
    assert experts.note == "measured: a test"
    # Experts of other sizes are priced by their FLOPs; costs that were changed are refused.
    assert "by their FLOPs" in experts_of(replace(SIZES, ffn_hidden_size=512), loaded).note
    path.write_text(path.read_text().replace("launch_us: 4.0", "launch_us: 5.0"))
    with pytest.raises(ValueError, match="checksum"):
        load_cluster(path)
