"""The computations behind `monta bench`, against numbers worked by hand."""

import dataclasses
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
import yaml

from monta_megatron.core import Layout
from monta_megatron.planner.routing import UniformRouting
from monta_megatron.tools import stock_collectives
from monta_megatron.tools.bench.candidates import draw_experts
from monta_megatron.tools.bench.measure import rows_that_cross
from monta_megatron.tools.bench.report import Report, Row
from monta_megatron.tools.bench.settings import parse_settings

HERE = Path(__file__).parent
# Name -> reports, as a file of results has them.
REPORTS = yaml.safe_load((HERE / "reports.yaml").read_text())
BASE = {"experts": "8", "top_k": "2", "hidden": "16", "tokens": "4"}
# Two nodes of two ranks, eight experts.
FLAT = Layout(ep=4, etp=1, num_local_experts=2, rank=0, nodes=(0, 0, 1, 1))
SPLIT = Layout(ep=2, etp=2, num_local_experts=4, rank=0, nodes=(0, 0, 1, 1))


def routing_map(*tokens: tuple[int, ...]) -> torch.Tensor:
    """[T, 8] from the experts of each token."""
    chosen = torch.zeros(len(tokens), 8, dtype=torch.bool)
    for token, experts in enumerate(tokens):
        chosen[token, list(experts)] = True
    return chosen


# Three ranks; 4 rows of 3 values of 4 bytes.
SENT = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("name", "sent", "rows", "num_bytes"),
    [
        ("alltoall", SENT, [1, 0, 3], [12, 0, 36]),
        ("alltoall", SENT[:3], None, [12, 12, 12]),
        ("alltoall", SENT[:0], [0, 0, 0], [0, 0, 0]),
        ("allgather", SENT, None, [48, 48, 48]),
        ("allgather", torch.zeros(4, dtype=torch.bool), None, [4, 4, 4]),
        # Numbers of rows are no payload.
        ("allgather", torch.zeros(4, dtype=torch.int64), None, [0, 0, 0]),
        ("reduce_scatter", SENT[:3], None, [12, 12, 12]),
        ("reduce_scatter", [SENT, SENT[:1], SENT[:0]], None, [48, 12, 0]),
        # A share to its owner, and its sum back.
        ("allreduce", SENT[:3], None, [24, 24, 24]),
    ],
)
def test_payload_of_stocks_collectives(
    name: str, sent: Any, rows: list[int] | None, num_bytes: list[int]
) -> None:
    assert stock_collectives.bytes_by_rank(name, sent, rows, 3) == num_bytes


def test_payload_by_link(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 1, on node 0 with rank 0; a rank's bytes to itself are none.
    monkeypatch.setattr(stock_collectives.dist, "get_rank", lambda: 1)
    nodes = (0, 0, 1, 1)
    across = stock_collectives.by_link("alltoall", [0, 1, 3], [5, 7, 11], nodes)
    assert across == ("alltoall", "inter", {"inter": 11, "intra": 5})
    inside = stock_collectives.by_link("allgather", [0, 1], [5, 7], nodes)
    assert inside == ("allgather", "intra", {"inter": 0, "intra": 5})


def test_rows_that_cross_once_per_token_and_node() -> None:
    # Both tokens have experts on node 1, one of them two: each crosses once.
    chosen = routing_map((0, 2, 4), (4, 5))
    assert rows_that_cross(FLAT, chosen, 2).tolist() == [[2, 0], [0, 2]]
    there = dataclasses.replace(FLAT, rank=3)
    assert rows_that_cross(there, chosen, 2).tolist() == [[0, 1], [1, 0]]
    # An expert whose parts lie on both nodes needs every token on both.
    across = Layout(ep=1, etp=4, num_local_experts=8, rank=0, nodes=(0, 0, 1, 1))
    assert rows_that_cross(across, chosen, 2).tolist() == [[2, 0], [0, 2]]
    # Other nodes of the launch belong to other exchanges.
    assert rows_that_cross(FLAT, chosen, 3).tolist() == [[2, 0, 0], [0, 2, 0]]
    one_node = dataclasses.replace(FLAT, nodes=(1, 1, 1, 1))
    assert not rows_that_cross(one_node, chosen, 2).any()


@pytest.mark.parametrize("name", ["uniform", "skewed"])
def test_drawn_experts(name: str) -> None:
    flags = {"experts": "8", "top_k": "3", "hidden": "16", "tokens": "6000", "routing": name}
    settings = parse_settings(flags, 4)
    drawn = draw_experts(settings, torch.Generator().manual_seed(2)).numpy()
    assert (drawn.sum(axis=1) == 3).all()
    is_uneven = drawn.mean(axis=0).max() > 0.5
    assert is_uneven == (name == "skewed")
    if not is_uneven:
        expected = UniformRouting(num_experts=8, topk=3)
        for num_parts in (2, 4):
            hits = drawn.reshape(len(drawn), num_parts, -1).any(axis=2).mean(axis=0)
            # Three standard deviations of a share of 6,000 tokens are under 0.02.
            assert expected.hits(num_parts) == pytest.approx(hits, abs=0.02)


def test_settings_have_defaults() -> None:
    settings = parse_settings({**BASE, "tp": "2", "dtype": "bf16"}, world_size=8)
    assert (settings.tp, settings.ep, settings.etp, settings.ranks_per_node) == (2, 4, 2, None)
    assert settings.stock == ("alltoall", "allgather")
    assert (settings.phase, settings.dtype) == (("forward_backward",), "bfloat16")
    assert settings.skip_incompatible
    # The ratio needs stock alltoall.
    named = parse_settings({**BASE, "stock": "allgather", "chains": "alltoall"}, 4)
    assert named.stock == ("alltoall", "allgather")
    assert not named.skip_incompatible
    assert settings.chains[0] == "alltoall" and settings.chains[-1] == "auto"


def test_choices() -> None:
    settings = parse_settings({**BASE, "chains": "alltoall,alltoall_dedup,auto"}, 4)
    names = [choice and choice.name for choice in settings.choices]
    dedup = "alltoall_dedup in 1 chunk", "alltoall_dedup in 4 chunks"
    assert names == ["alltoall in 1 chunk", *dedup, None]


def test_table_of_the_largest_figures_fits_a_terminal() -> None:
    (largest,) = REPORTS["largest"]
    report = Report(meta=largest["meta"], rows=[Row(**row) for row in largest["rows"]])
    assert max(map(len, report.text().splitlines())) <= 100
    golden.check(HERE / "largest.txt", report.text() + "\n")
