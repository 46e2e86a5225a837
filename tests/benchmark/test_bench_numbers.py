"""The computations behind `monta bench`, against numbers worked by hand."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from monta_megatron.common import strict_yaml
from monta_megatron.common.first_rank import is_first_rank
from monta_megatron.common.ranks import find_this_rank
from monta_megatron.core import Layout
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import plan
from monta_megatron.tools.bench import traffic
from monta_megatron.tools.bench.report import Row, ratio_interval, ratio_of_medians, spread
from monta_megatron.tools.bench.settings import parse_settings
from monta_megatron.tools.bench.traffic import Traffic, predict, shape_of

CLUSTER = Path(__file__).parents[2] / "configs/clusters/a800_2x8_ib200.yaml"
MODEL = Path(__file__).parents[2] / "configs/models/mixtral_8x7b.yaml"
# Two nodes of two ranks, eight experts; rows of 4 values of 4 bytes, so a permuted token costs 16
# + 4 bytes there and 16 back.
FLAT = Layout(ep=4, etp=1, num_local_experts=2, rank=0, nodes=(0, 0, 1, 1))
SPLIT = Layout(ep=2, etp=2, num_local_experts=4, rank=0, nodes=(0, 0, 1, 1))
HIDDEN, DTYPE_BYTES = 4, 4


def routing_map(*tokens: tuple[int, ...]) -> np.ndarray:
    """[T, 8] from the experts of each token."""
    chosen = np.zeros((len(tokens), 8), dtype=np.bool_)
    for token, experts in enumerate(tokens):
        chosen[token, list(experts)] = True
    return chosen


def test_stock_alltoall_bytes() -> None:
    # One permuted token stays, one goes to rank 1, three to rank 2 on node 1: 36 bytes each.
    chosen = routing_map((0, 2, 4), (4, 5))
    forward = traffic.stock_alltoall(FLAT, chosen, HIDDEN, DTYPE_BYTES, False)
    assert forward == Traffic(inter_bytes=108, intra_bytes=36)
    both = traffic.stock_alltoall(FLAT, chosen, HIDDEN, DTYPE_BYTES, True)
    assert both == Traffic(inter_bytes=216, intra_bytes=72)


def test_stock_alltoall_bytes_with_expert_tensor_parallelism() -> None:
    # One permuted token stays with rank 0, one goes to rank 2: 36 bytes. Each then goes to its
    # expert's other part (16 + 4) and is summed from there in fp32 (16): 36 bytes inside each node.
    chosen = routing_map((0, 4))
    moved = traffic.stock_alltoall(SPLIT, chosen, HIDDEN, DTYPE_BYTES, False)
    assert moved == Traffic(inter_bytes=36, intra_bytes=72)
    # In bf16 a row has 8 bytes, but the sum over the parts stays in fp32: 2 * 8 + 4 between nodes,
    # 8 + 4 + 16 inside, twice.
    moved = traffic.stock_alltoall(SPLIT, chosen, HIDDEN, 2, False)
    assert moved == Traffic(inter_bytes=20, intra_bytes=56)


def test_stock_allgather_bytes() -> None:
    # Two tokens to each of three peers: 16 + 16 bytes of row, 8 probabilities, 8 bytes of map.
    chosen = routing_map((0, 2, 4), (4, 5))
    forward = traffic.stock_allgather(FLAT, chosen, HIDDEN, DTYPE_BYTES, False)
    assert forward == Traffic(inter_bytes=2 * 144, intra_bytes=144)
    # The map does not come back.
    both = traffic.stock_allgather(FLAT, chosen, HIDDEN, DTYPE_BYTES, True)
    assert both == Traffic(inter_bytes=2 * 272, intra_bytes=272)


def test_rows_that_cross_once_per_token_and_node() -> None:
    # Both tokens have experts on node 1, one of them two: each crosses once.
    chosen = routing_map((0, 2, 4), (4, 5))
    assert traffic.rows_that_cross(FLAT, chosen, 2).tolist() == [0, 2]
    there = dataclasses.replace(FLAT, rank=3)
    assert traffic.rows_that_cross(there, chosen, 2).tolist() == [1, 0]
    # An expert whose parts lie on both nodes needs every token on both.
    across = Layout(ep=1, etp=4, num_local_experts=8, rank=0, nodes=(0, 0, 1, 1))
    assert traffic.rows_that_cross(across, chosen, 2).tolist() == [0, 2]
    # Other nodes of the launch belong to other exchanges.
    assert traffic.rows_that_cross(FLAT, chosen, 4).tolist() == [0, 2, 0, 0]
    one_node = dataclasses.replace(FLAT, nodes=(1, 1, 1, 1))
    assert traffic.rows_that_cross(one_node, chosen, 2).tolist() == [0, 0]


def test_limit() -> None:
    # 1,000 rows of 4,096 bytes, there and back, at 0.5 Gbit/s.
    crossing = np.array([[0, 1000], [1000, 0]])
    assert traffic.limit_ms(crossing, 2 * 4096, 0.5) == pytest.approx(131.072)
    # Node 2 receives 1,500 rows, which is more than any node sends.
    crossing = np.array([[0, 0, 700], [100, 0, 800], [300, 300, 0]])
    assert traffic.limit_ms(crossing, 1000, 1.0) == pytest.approx(12.0)


@pytest.mark.parametrize("name", ["uniform", "skewed", "node-limited"])
def test_data_are_top_k_and_as_the_planner_expects_them(name: str) -> None:
    flags = {"experts": "8", "top_k": "3", "hidden": "16", "tokens": "6000", "routing": name}
    settings = parse_settings(flags, 4)
    drawn = traffic.routing_map(settings, FLAT, rank=2)
    assert (drawn.sum(axis=1) == 3).all()
    assert np.array_equal(drawn, traffic.routing_map(settings, FLAT, rank=2))
    assert not np.array_equal(drawn, traffic.routing_map(settings, FLAT, rank=3))
    is_uneven = drawn.mean(axis=0).max() > 0.5
    assert is_uneven == (name == "skewed")
    if not is_uneven:
        expected = traffic.routing_of(settings, FLAT)
        for num_parts in (2, 4):
            hits = drawn.reshape(len(drawn), num_parts, -1).any(axis=2).mean(axis=0)
            # Three standard deviations of a share of 6,000 tokens are under 0.02.
            assert expected.hits(num_parts) == pytest.approx(hits, abs=0.02)
    on_both_nodes = drawn[:, :4].any(axis=1) & drawn[:, 4:].any(axis=1)
    assert on_both_nodes.any() == (name != "node-limited")


def test_node_limited_routing_needs_nodes_with_room() -> None:
    flags = {"experts": "8", "top_k": "5", "hidden": "16", "tokens": "4"}
    settings = parse_settings({**flags, "routing": "node-limited"}, 4)
    for nodes, name, held in (((0, 0, 1, 1), "2 nodes", 4), ((0, 0, 0, 0), "1 node", 0)):
        layout = dataclasses.replace(FLAT, nodes=nodes)
        rule = rf"must leave the 5 experts .* half of {name}, rounded down, hold {held}"
        for draw in (traffic.routing_of, lambda *given: traffic.routing_map(*given, rank=0)):
            with pytest.raises(ValueError, match=rule):
                draw(settings, layout)


def test_spread_and_ratio() -> None:
    times_ms = np.arange(1.0, 12.0)
    assert spread(times_ms) == (2.0, 6.0, 10.0)
    assert ratio_of_medians(2 * times_ms, times_ms) == 2.0


def test_interval_of_a_ratio_keeps_repeats_together() -> None:
    # The machine is ten times slower in half of the repeats, for both: the ratio is exactly 2.
    times_ms = np.array([1.0, 10.0] * 10)
    assert ratio_interval(2 * times_ms, times_ms) == (2.0, 2.0)
    # Medians of 20 draws with a deviation of 10% have one of about 3%.
    noise = np.random.default_rng(0).normal(1.0, 0.1, size=(2, 20))
    low, high = ratio_interval(3 * noise[0], noise[1])
    assert low < 3 < high and 0.1 < high - low < 0.8
    assert ratio_interval(np.array([4.0]), np.array([2.0])) == (2.0, 2.0)


BASE = {"experts": "8", "top_k": "2", "hidden": "16", "tokens": "4"}


def test_settings_have_defaults() -> None:
    settings = parse_settings({**BASE, "tp": "2"}, world_size=8)
    assert (settings.tp, settings.ep, settings.etp, settings.ranks_per_node) == (2, 4, 2, None)
    assert settings.stock == ("alltoall", "allgather")
    assert settings.phases == ("forward", "forward_backward")
    assert settings.skip_incompatible
    # The ratio needs stock alltoall.
    named = parse_settings({**BASE, "stock": "allgather", "chains": "alltoall"}, 4)
    assert named.stock == ("alltoall", "allgather")
    assert not named.skip_incompatible
    # "all" includes the chain beside it.
    assert parse_settings({**BASE, "chains": "alltoall,all"}, 4) == parse_settings(BASE, 4)


@pytest.mark.parametrize(
    ("name", "torch_name", "value_bytes"),
    [("fp32", "float32", 4), ("bf16", "bfloat16", 2), ("fp16", "float16", 2)],
)
def test_a_dtype_has_megatron_s_name_or_pytorch_s(
    name: str, torch_name: str, value_bytes: int
) -> None:
    settings = [
        parse_settings({**BASE, "hidden": "16", "dtype": dtype}, 4) for dtype in (name, torch_name)
    ]
    assert settings[0] == settings[1]
    assert settings[0].dtype == torch_name
    assert settings[0].crossing_bytes(backward=True) == 4 * 16 * value_bytes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"experts": "x"}, "--experts: got 'x', must be an integer >= 1"),
        ({"tokens": "0"}, "--tokens: got '0', must be an integer >= 1"),
        ({"top_k": "9"}, "--top-k: got 9, must be at most --experts (8)"),
        ({"tp": "3"}, "--tp: got 3, must be a divisor of the 4 ranks of this launch"),
        ({"ep": "3"}, "--ep: got 3, must be such that ep x etp (3 x 1) divides the 4 ranks"),
        ({"experts": "6"}, "--experts: got 6, must be a multiple of --ep (4)"),
        ({"hidden": "15", "tp": "2"}, "--hidden: got 15, must be a multiple of --tp (2)"),
        ({"dtype": "fp8"}, "--dtype: got 'fp8', must be one of float32, bfloat16"),
        ({"chains": "alltoal"}, "--chains: got 'alltoal', must be one of alltoall,"),
        ({"chains": "alltoall,"}, "--chains: got 'alltoall,', must be a list"),
        ({"num_chunks": "1,0"}, "--num-chunks: got '0', must be an integer >= 1"),
        ({"routing": "zipf"}, "--routing: got 'zipf', must be one of uniform, skewed"),
        ({"inter_rate_ratio": "0"}, "--inter-rate-ratio: got '0', must be a number > 0"),
        ({"inter_rate_ratio": "2"}, "--inter-rate-ratio: got 2, must come with --cluster"),
        ({"ffn_hidden": "3", "tp": "2"}, "--ffn-hidden: got 3, must be a multiple of --etp (2)"),
    ],
)
def test_bad_settings_are_named(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_settings({**BASE, **flags}, world_size=4)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_predictions_are_the_plans_in_milliseconds() -> None:
    settings = parse_settings({**BASE, "experts": "16", "tokens": "512", "hidden": "1024"}, 4)
    layout = dataclasses.replace(FLAT, num_local_experts=4)
    cluster = strict_yaml.load(Cluster, CLUSTER)
    keys = [("alltoall", 1), ("hierarchical_alltoall", 4)]
    predicted_ms, chosen = predict(settings, layout, cluster, "forward", keys)
    planned = plan(
        shape_of(settings, layout),
        cluster,
        phase="forward",
        chains=["alltoall", "hierarchical_alltoall"],
        num_chunks=(1, 4),
    )
    assert set(keys) <= set(predicted_ms)
    assert chosen == (planned.chain, planned.num_chunks)
    assert planned.predicted_us is not None
    assert predicted_ms[chosen] == pytest.approx(planned.predicted_us / 1000)
    assert predict(settings, layout, None, "forward", keys) == ({}, None)


def test_launchers() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    launch = find_this_rank("bench", torchrun)
    assert (launch.rank, launch.world_size, launch.local_rank) == (5, 8, 1)
    assert not is_first_rank(torchrun)

    slurm = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "0",
        "MASTER_ADDR": "node0",
    }
    assert is_first_rank(slurm)
    assert find_this_rank("bench", slurm).world_size == 16
    assert slurm["RANK"] == "0" and slurm["MASTER_PORT"] == "29500"

    with pytest.raises(ValueError, match="RANK, WORLD_SIZE: not set"):
        find_this_rank("bench", {})
    # A batch step of Slurm that no srun started has a rank and no number of tasks.
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE: not set"):
        find_this_rank("bench", {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    del slurm["MASTER_ADDR"], slurm["RANK"]
    with pytest.raises(ValueError, match="MASTER_ADDR: not set"):
        find_this_rank("bench", slurm)


def row(**changes: object) -> Row:
    values = {
        "dispatcher": "monta",
        "chain": "hierarchical_allgather",
        "num_chunks": 8,
        "requested": "auto",
        "scope": "exchange",
        "phase": "forward_backward",
        "tokens": 16384,
        "top_k": 8,
        "routing": "uniform",
        "experts": 64,
        "hidden": 1024,
        "dtype": "float32",
        "tp": 1,
        "ep": 8,
        "etp": 1,
        "inter_mbit": 500.0,
        "median_ms": 12345.6,
        "p10_ms": 12345.6,
        "p90_ms": 23456.7,
        "inter_bytes": 9_999_900_000,
        "intra_bytes": 9_999_900_000,
        "nic_bytes": None,
        "pct_of_limit": 100.0,
        "ratio_to_alltoall": 10.25,
        "ratio_low": 10.0,
        "ratio_high": 10.5,
    }
    return Row(**{**values, **changes})
