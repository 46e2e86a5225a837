"""The computations behind `monta bench`, against numbers worked by hand."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monta_megatron.common import strict_yaml
from monta_megatron.common.first_rank import is_first_rank
from monta_megatron.common.ranks import find_this_rank
from monta_megatron.core import Layout
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import plan
from monta_megatron.tools.bench import traffic
from monta_megatron.tools.bench.report import Report, Row
from monta_megatron.tools.bench.settings import parse_settings

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


TOKENS = routing_map((0, 2, 4), (4, 5))


@pytest.mark.parametrize(
    ("count", "layout", "chosen", "value_bytes", "forward", "both"),
    [
        # One permuted token stays, one goes to rank 1, three to rank 2 on node 1: 36 bytes each.
        (traffic.stock_alltoall, FLAT, TOKENS, 4, (108, 36), (216, 72)),
        # One permuted token stays with rank 0, one goes to rank 2: 36 bytes. Each then goes to its
        # expert's other part (16 + 4) and is summed from there in fp32 (16): 36 bytes in each node.
        (traffic.stock_alltoall, SPLIT, routing_map((0, 4)), 4, (36, 72), None),
        # In bf16 a row has 8 bytes, but the sum over the parts stays in fp32: 2 * 8 + 4 between
        # nodes, 8 + 4 + 16 inside, twice.
        (traffic.stock_alltoall, SPLIT, routing_map((0, 4)), 2, (20, 56), None),
        # Two tokens to each of three peers: 16 + 16 bytes of row, 8 probabilities, 8 bytes of map,
        # which does not come back.
        (traffic.stock_allgather, FLAT, TOKENS, 4, (2 * 144, 144), (2 * 272, 272)),
    ],
)
def test_bytes_of_stock(
    count: Any, layout: Layout, chosen: np.ndarray, value_bytes: int, forward: Any, both: Any
) -> None:
    assert count(layout, chosen, HIDDEN, value_bytes, False) == forward
    assert both is None or count(layout, chosen, HIDDEN, value_bytes, True) == both


def test_rows_that_cross_once_per_token_and_node() -> None:
    # Both tokens have experts on node 1, one of them two: each crosses once.
    chosen = TOKENS
    assert traffic.rows_that_cross(FLAT, chosen, 2).tolist() == [[0, 2], [0, 0]]
    there = dataclasses.replace(FLAT, rank=3)
    assert traffic.rows_that_cross(there, chosen, 2).tolist() == [[0, 0], [1, 0]]
    # An expert whose parts lie on both nodes needs every token on both.
    across = Layout(ep=1, etp=4, num_local_experts=8, rank=0, nodes=(0, 0, 1, 1))
    assert traffic.rows_that_cross(across, chosen, 2).tolist() == [[0, 2], [0, 0]]
    # Other nodes of the launch belong to other exchanges.
    assert traffic.rows_that_cross(FLAT, chosen, 3).tolist() == [[0, 2, 0], [0] * 3, [0] * 3]
    one_node = dataclasses.replace(FLAT, nodes=(1, 1, 1, 1))
    assert not traffic.rows_that_cross(one_node, chosen, 2).any()


def test_limit() -> None:
    # 1,000 rows of 4,096 bytes, there and back, at 0.5 Gbit/s.
    crossing = np.array([[0, 1000], [1000, 0]])
    assert traffic.limit_ms(crossing, 2 * 4096, 0.5) == pytest.approx(131.072)
    # Node 2 receives 1,500 rows, which is more than any node sends.
    crossing = np.array([[0, 0, 700], [100, 0, 800], [300, 300, 0]])
    assert traffic.limit_ms(crossing, 1000, 1.0) == pytest.approx(12.0)
    assert traffic.limit_ms(np.zeros((2, 2), dtype=int), 1000, 1.0) is None


@pytest.mark.parametrize("name", ["uniform", "skewed"])
def test_drawn_experts(name: str) -> None:
    flags = {"experts": "8", "top_k": "3", "hidden": "16", "tokens": "6000", "routing": name}
    settings = parse_settings(flags, 4)
    drawn = traffic.routing_map(settings, rank=2)
    assert (drawn.sum(axis=1) == 3).all()
    assert np.array_equal(drawn, traffic.routing_map(settings, rank=2))
    assert not np.array_equal(drawn, traffic.routing_map(settings, rank=3))
    is_uneven = drawn.mean(axis=0).max() > 0.5
    assert is_uneven == (name == "skewed")
    if not is_uneven:
        expected = traffic.shape_of(settings, FLAT).routing
        for num_parts in (2, 4):
            hits = drawn.reshape(len(drawn), num_parts, -1).any(axis=2).mean(axis=0)
            # Three standard deviations of a share of 6,000 tokens are under 0.02.
            assert expected.hits(num_parts) == pytest.approx(hits, abs=0.02)


BASE = {"experts": "8", "top_k": "2", "hidden": "16", "tokens": "4"}


def test_settings_have_defaults() -> None:
    settings = parse_settings({**BASE, "tp": "2"}, world_size=8)
    assert (settings.tp, settings.ep, settings.etp, settings.ranks_per_node) == (2, 4, 2, None)
    assert settings.stock == ("alltoall", "allgather")
    assert settings.phase == ("forward_backward",)
    assert settings.skip_incompatible
    # The ratio needs stock alltoall.
    named = parse_settings({**BASE, "stock": "allgather", "chains": "alltoall"}, 4)
    assert named.stock == ("alltoall", "allgather")
    assert not named.skip_incompatible
    # "all" includes the chain beside it.
    assert parse_settings({**BASE, "chains": "alltoall,all"}, 4) == parse_settings(BASE, 4)


def test_a_dtype_has_megatron_s_name_or_pytorch_s() -> None:
    for name, same, value_bytes in (
        ("fp32", "float32", 4),
        ("bf16", "bfloat16", 2),
        ("fp16", "float16", 2),
    ):
        settings = parse_settings({**BASE, "dtype": name}, 4)
        assert settings == parse_settings({**BASE, "dtype": same}, 4)
        assert settings.dtype == same
        assert traffic.shape_of(settings, FLAT).value_bytes == value_bytes


def test_pipelines_with_experts_come_last() -> None:
    flags = {"chains": "alltoall,alltoall_dedup,auto", "layer": True, "overlap_experts": True}
    assert parse_settings({**BASE, **flags}, 4).pipelines == [
        ("alltoall", 1, False),
        ("alltoall_dedup", 1, False),
        ("alltoall_dedup", 4, False),
        ("auto", None, False),
        ("alltoall_dedup", 4, True),
        ("auto", None, True),
    ]


def test_predictions_are_the_plans_in_milliseconds() -> None:
    settings = parse_settings({**BASE, "experts": "16", "tokens": "512", "hidden": "1024"}, 4)
    cluster = strict_yaml.load(Cluster, CLUSTER)
    shape = traffic.shape_of(settings, dataclasses.replace(FLAT, num_local_experts=4))
    planned = plan(shape, cluster, phase="forward", chains=["alltoall_dedup"], num_chunks=(4,))
    predicted_ms = traffic.predict_ms(shape, cluster, "alltoall_dedup", 4, "forward")
    assert planned.predicted_us == pytest.approx(1e3 * predicted_ms)


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
    values: dict[str, object] = {
        **{"dispatcher": "monta", "chain": "hierarchical_allgather", "num_chunks": 8},
        **{"scope": "exchange", "phase": "forward_backward", "tokens": 16384, "top_k": 8},
        **{"routing": "uniform", "tp": 1, "ep": 8, "etp": 1, "inter_mbit": 500.0},
        **{"median_ms": 12345.6, "p10_ms": 12345.6, "p90_ms": 23456.7},
        **dict.fromkeys(("inter_bytes", "intra_bytes"), 9_999_900_000),
        **{"pct_of_limit": 100.0, "ratio_to_alltoall": 10.25},
    }
    return Row(**{**values, **changes})


def test_table_of_the_largest_figures_fits_a_terminal() -> None:
    rows = [row(), row(chosen=True, num_chunks=4), row(scope="layer", experts_pipelined=True)]
    text = Report(meta={"skipped": {"allgather": "why"}}, rows=rows).text()
    assert max(map(len, text.splitlines())) <= 100
    for part in ("\nhierarchical_allgather x8 ", "\nauto: hierarchical_allgather x4 "):
        assert part in text
    assert text.count("chain x chunks") == 2 and text.endswith("\n\nleft out: allgather: why")
