"""Bytes of a pass by hand, and expected rows through the same code as counted ones."""

import dataclasses

import numpy as np
import pytest
from clusters import preset, shape_of
from counted_routing import CountedRouting

from monta_megatron.chains import CHAINS, BoundChain
from monta_megatron.chains.program import (
    COMBINE,
    DISPATCH,
    FORWARD_BACKWARD,
    Pass,
    offsets_bytes,
)
from monta_megatron.core import Shape
from monta_megatron.planner import traffic as program_traffic
from monta_megatron.planner.price import (
    Price,
    bind_expected,
    lower_expected,
    peak_bytes,
    price,
)
from monta_megatron.planner.traffic import PassTraffic


def traffic_of(shape: Shape, chain: str, num_chunks: int, pass_: Pass = DISPATCH) -> PassTraffic:
    """Of rank 0."""
    bound = bind_expected(shape, CHAINS[chain], num_chunks, shape.layout)
    program = lower_expected(shape, bound, pass_, "streams")
    return program_traffic.pass_traffic([program], shape.tokens_per_rank, num_chunks)


def bytes_of_copies(shape: Shape, chain: str, num_chunks: int, pass_: Pass) -> dict:
    """(stage, kind) -> bytes that the copies of rank 0 read and write."""
    traffic = traffic_of(shape, chain, num_chunks, pass_)
    return {
        (stage.stage, stage.kind): stage.moved["memory"].num_bytes.sum()
        for stage in (*traffic.before, *traffic.pipeline, *traffic.after)
        if stage.resource == "memory"
    }


def uneven_shape() -> Shape:
    """4 ranks on 2 nodes, with a routing in which no two of them are alike."""
    generator = np.random.default_rng(1)
    maps = tuple(generator.random((count, 16)) < 0.2 for count in (30, 0, 7, 41))
    routing = CountedRouting(routing_maps=maps)
    return shape_of(4, ranks_per_node=2, num_experts=16, routing=routing)


def every_rank(shape: Shape, chain: str, num_chunks: int) -> list[BoundChain]:
    """The chain as each rank sees it."""
    layout = shape.layout
    return [
        bind_expected(shape, CHAINS[chain], num_chunks, dataclasses.replace(layout, rank=rank))
        for rank in range(len(layout.nodes))
    ]


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


@pytest.mark.parametrize("chain", CHAINS)
def test_what_is_sent_is_received(chain: str) -> None:
    """Over all ranks, in every pass and chunk."""
    shape = uneven_shape()
    num_chunks = 1 if CHAINS[chain].serial else 3
    ranks = every_rank(shape, chain, num_chunks)
    for pass_ in FORWARD_BACKWARD:
        programs = [lower_expected(shape, each, pass_, "streams") for each in ranks]
        traffic = program_traffic.pass_traffic(programs, shape.tokens_per_rank, 3)
        for stage in traffic.pipeline:
            if stage.resource != "memory":
                for resource, moved in stage.moved.items():
                    sent, received = moved.num_bytes.sum(axis=1)
                    assert np.array_equal(sent, received), (pass_.name, stage.stage, resource)


def test_copies_by_hand() -> None:
    # 1,024 tokens of 8,192 bytes; 8,192 pairs leave a rank and as many arrive. Every copy reads and
    # writes; packed, a pair has 8,208 bytes.
    shape = shape_of(16, tokens=1024)
    assert bytes_of_copies(shape, "alltoall_allgather", 2, DISPATCH) == {
        ("count", "count"): 6 * 1024 * 64,
        ("permute", "permute"): 2 * 8192 * 8192,
        ("pack", "pack"): pytest.approx(2 * 8192 * 8208),
        ("order", "put"): pytest.approx(2 * 8192 * 8196),
    }
    # At the end pairs are read and tokens are written.
    assert bytes_of_copies(shape, "alltoall_allgather", 2, COMBINE) == {
        ("order", "pack"): pytest.approx(2 * 8192 * 8192),
        ("pack", "put"): pytest.approx(2 * 8192 * 8192),
        ("unpermute", "unpermute"): 8192 * (8192 + 1024),
    }


def test_a_sum_over_ranks_by_hand() -> None:
    # 1,024 tokens, top-2 of 8 experts on 2 EP ranks: each takes half of the 2,048 pairs of a rank,
    # so each of its 8 ETP ranks has 2 x 1,024 pairs to sum. It reads 8 copies and writes one sum.
    shape = shape_of(2, 8, num_experts=8, topk=2, tokens=1024)
    found = bytes_of_copies(shape, "alltoall_allgather", 2, COMBINE)
    assert found["sum of allgather", "reduce_ranks"] == pytest.approx((8 + 1) * 2048 * 8192)


@pytest.mark.parametrize(
    ("chain", "num_chunks", "pass_", "stages"),
    [
        # One chunk in Megatron's own order goes out as it lies; chunks are packed.
        ("alltoall", 1, DISPATCH, "count, permute, order"),
        ("alltoall_allgather", 2, DISPATCH, "count, permute, pack, order"),
        # A run of tokens is a view on the way out, and a copy on the way back, where the experts'
        # rows are summed from where they lie.
        ("alltoall_dedup", 2, DISPATCH, "count, expert ids, copy per rank, copy per expert, order"),
        ("alltoall_dedup", 2, COMBINE, "copy per expert, copy per rank, split"),
    ],
)
def test_copies_that_the_executor_does_not_make_are_free(
    chain: str, num_chunks: int, pass_: Pass, stages: str
) -> None:
    copies = bytes_of_copies(shape_of(16, tokens=1024), chain, num_chunks, pass_)
    # What is found before it is copied is one stage.
    assert ", ".join(dict.fromkeys(stage for stage, _ in copies)) == stages


@pytest.mark.parametrize("chain", CHAINS)
def test_the_peak_is_of_the_fullest_rank_in_its_fullest_pass(chain: str) -> None:
    shape = uneven_shape()
    num_chunks = 1 if CHAINS[chain].serial else 3
    peaks = [
        peak_bytes(lower_expected(shape, bound, pass_, "streams"))
        for bound in every_rank(shape, chain, num_chunks)
        for pass_ in FORWARD_BACKWARD
    ]
    cluster = preset("h100_8x_ndr").with_kernels(fused=False)
    found = price(shape, cluster, CHAINS[chain], num_chunks)
    assert found.peak_bytes == max(peaks) > min(peaks)


def test_fused_kernels_are_priced_as_they_run() -> None:
    """Rows go to their places in expert order at once: one write and one read of them are saved."""
    shape, chain = shape_of(16), CHAINS["hierarchical_alltoall"]
    cluster = preset("h100_8x_ndr")
    torch_price, fused_price = (
        price(shape, cluster.with_kernels(fused), chain, 4) for fused in (False, True)
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
    assert "split" in copies(torch_price, "combine")
    assert "split" not in copies(fused_price, "combine")
    assert fused_price.peak_bytes < 0.9 * torch_price.peak_bytes
    assert fused_price.total_us < torch_price.total_us
    # Where the host copies there are none.
    on_host = preset("emulated_2x4_500mbit")
    assert on_host.with_kernels(True) is on_host
