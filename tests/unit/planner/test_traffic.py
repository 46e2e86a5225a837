"""Bytes of a pass by hand, and expected rows through the same code as counted ones."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from clusters import H100, by_hand, preset, shape_of
from counted_routing import CountedRouting

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import (
    COMBINE,
    DISPATCH,
    FORWARD_BACKWARD,
    BoundProgram,
    Pass,
    offsets_bytes,
)
from monta_megatron.core import Shape
from monta_megatron.planner.price import Price, bind_expected, lower_expected, peak_bytes, price
from monta_megatron.planner.traffic import PassTraffic, pass_traffic


def programs_of(
    shape: Shape, chain: str, num_chunks: int, pass_: Pass, num_ranks: int
) -> list[BoundProgram]:
    """The program of each of the first ranks."""
    layouts = (replace(shape.layout, rank=rank) for rank in range(num_ranks))
    bound = (bind_expected(shape, CHAINS[chain], num_chunks, layout) for layout in layouts)
    return [lower_expected(shape, of_rank, pass_, "streams") for of_rank in bound]


def traffic_of(
    shape: Shape, chain: str, num_chunks: int, pass_: Pass = DISPATCH, num_ranks: int = 1
) -> PassTraffic:
    programs = programs_of(shape, chain, num_chunks, pass_, num_ranks)
    return pass_traffic(programs, shape.tokens_per_rank, num_chunks)


def uneven_shape() -> Shape:
    """4 ranks on 2 nodes, with a routing in which no two of them are alike."""
    generator = np.random.default_rng(1)
    maps = tuple(generator.random((count, 16)) < 0.2 for count in (30, 0, 7, 41))
    routing = CountedRouting(routing_maps=maps)
    return shape_of(4, ranks_per_node=2, num_experts=16, routing=routing)


def test_offsets() -> None:
    # 6 bf16 values, 1 fp32 probability: 12 bytes, then 4, 16 in all.
    assert offsets_bytes([(6, 2), (1, 4)]) == [0, 12, 16]
    # 3 bf16 values: 6 bytes, then 2 of padding before 2 fp32 and 2 int32; 24 padded to 32.
    assert offsets_bytes([(3, 2), (2, 4), (2, 4)]) == [0, 8, 16, 32]


@pytest.mark.parametrize("chain", sorted(CHAINS.keys() - {"alltoall"}))
def test_expected_rows_do_not_depend_on_the_number_of_chunks(chain: str) -> None:
    whole, *others = (
        [
            stage.sent_bytes(resource, [1])
            for stage in traffic_of(shape_of(16, tokens=1000), chain, number).pipeline
            for resource in ("inter", "intra")
        ]
        for number in (2, 3, 8)
    )
    assert all(each == pytest.approx(whole) for each in others)


@pytest.mark.parametrize("pass_", FORWARD_BACKWARD, ids=lambda pass_: pass_.name)
@pytest.mark.parametrize("chain", CHAINS)
def test_what_is_sent_is_received(chain: str, pass_: Pass) -> None:
    """Over all ranks, in every chunk."""
    num_chunks = 1 if CHAINS[chain].serial else 3
    for stage in traffic_of(uneven_shape(), chain, num_chunks, pass_, 4).pipeline:
        for resource in stage.moved.keys() - {"memory"}:
            sent, received = stage.moved[resource].num_bytes.sum(axis=1)
            assert np.array_equal(sent, received), (stage.stage, resource)


@pytest.mark.parametrize(
    "case", by_hand("copies"), ids=lambda case: f"{case['chain']} {case['pass']}"
)
def test_copies_by_hand(case: dict[str, Any]) -> None:
    shape = shape_of(**{"ep": 16, "tokens": 1024, **case.get("shape", {})})
    pass_ = {"dispatch": DISPATCH, "combine": COMBINE}[case["pass"]]
    traffic = traffic_of(shape, case["chain"], case["num_chunks"], pass_)
    num_bytes = {
        stage.stage: stage.moved["memory"].num_bytes.sum()
        for stage in (*traffic.counting, *traffic.before, *traffic.pipeline, *traffic.after)
        if stage.resource == "memory"
    }
    assert list(num_bytes) == case.get("stages", list(num_bytes))
    expected = case.get("bytes", {})
    assert {name: num_bytes[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("chain", CHAINS)
def test_the_peak_is_of_the_fullest_rank_in_its_fullest_pass(chain: str) -> None:
    shape, num_chunks = uneven_shape(), 1 if CHAINS[chain].serial else 3
    peaks = [
        peak_bytes(program)
        for pass_ in FORWARD_BACKWARD
        for program in programs_of(shape, chain, num_chunks, pass_, 4)
    ]
    found = price(shape, H100, CHAINS[chain], num_chunks)
    assert found.peak_bytes == max(peaks) > min(peaks)


def test_fused_kernels_are_priced_as_they_run() -> None:
    """Rows go to their places in expert order at once: one write and one read of them are saved."""
    shape, chain = shape_of(16), CHAINS["hierarchical_alltoall"]
    torch_price, fused_price = (
        price(shape, cluster, chain, 4) for cluster in (H100, H100.with_kernels(fused=True))
    )

    def copies(of: Price, pass_name: str) -> dict[str, tuple[str, float]]:
        """stage -> operation and bytes."""
        return {
            work.stage: (work.traffic.operation, work.traffic.moved["memory"].num_bytes.sum())
            for work in of.works
            if work.pass_name == pass_name and work.traffic and "memory" in work.traffic.moved
        }

    separate, at_once = (copies(of, "combine_backward") for of in (torch_price, fused_price))
    assert separate.keys() - at_once.keys() == {"order"}
    # Writing to places all over a tensor costs what it costs the operation that did it before.
    assert at_once["copy per expert"] == separate["order"]
    assert separate["copy per expert"][1] == separate["order"][1]
    # Chunks of sums lie in the output at once, too.
    assert copies(torch_price, "combine").keys() - copies(fused_price, "combine").keys() == {
        "split"
    }
    assert fused_price.peak_bytes < 0.9 * torch_price.peak_bytes
    assert fused_price.total_us < torch_price.total_us
    # Where the host copies there are none.
    on_host = preset("emulated_2x4_500mbit")
    assert on_host.with_kernels(True) is on_host
