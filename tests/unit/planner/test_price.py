"""Prices by hand: bytes and microseconds of all chains, the host's part, shared interfaces."""

from collections import Counter
from dataclasses import replace

import pytest
from clusters import H100, INSTANT, by_hand, cluster_of, layout_of, link, shape_of

from monta_megatron.chains import CHAINS
from monta_megatron.chains.chain import message_size
from monta_megatron.chains.program import FORWARD_BACKWARD
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.price import AROUND_STAGES, Price, Work, price
from monta_megatron.planner.stock import allgather_steps, stock_times_us
from monta_megatron.planner.training import Training

PRICES = by_hand("prices")
BY_HAND = cluster_of(link(1.0), link(10.0), link(1e9), ranks=2, nics=2)


def works(found: Price, pass_name: str, stage: str | None = None) -> list[Work]:
    return [
        work for work in found.works if work.pass_name == pass_name and stage in (None, work.stage)
    ]


@pytest.mark.parametrize("chain", CHAINS)
def test_known_answers_on_two_nodes_of_two(chain: str) -> None:
    case = PRICES[chain]
    shape = shape_of(
        *case["layout"], ranks_per_node=2, num_experts=4, topk=2, tokens=600, hidden=500
    )
    found, hops = price(shape, BY_HAND, CHAINS[chain], 1), case["rows"]
    passes = (("dispatch", hops), ("combine", hops[::-1]), ("dispatch_backward", hops[::-1]))
    for (pass_name, rows), size in zip(passes, case["row_bytes"], strict=True):
        assert [
            tuple(work.traffic.sent_bytes(resource, [1]) for resource in ("inter", "intra"))
            for work in works(found, pass_name)
            if work.traffic and work.resource != "memory" and work.stage != "exchange of counts"
        ] == [pytest.approx((inter * size, intra * size)) for inter, intra in rows]
    # The exchange of a few counts takes 0.05 to 0.6 us.
    assert found.total_us == pytest.approx(sum(case["one_chunk_us"]), abs=0.1)
    if "two_chunks_us" in case:
        pipelined = price(shape, BY_HAND, CHAINS[chain], 2)
        assert pipelined.total_us == pytest.approx(sum(case["two_chunks_us"]), abs=0.7)


def test_stock_alltoall_by_hand() -> None:
    """Its AllToAll takes as long as ours, which counts in no time."""
    shape = shape_of(4, ranks_per_node=2, num_experts=4, topk=2, tokens=600, hidden=500)
    alltoall_us = stock_times_us(shape, BY_HAND, Training())["alltoall"]
    assert alltoall_us == pytest.approx(sum(PRICES["alltoall"]["one_chunk_us"]), abs=0.1)


# 600 tokens of 500 bf16 values and 4 fp32 probabilities on each of 4 ranks; 1 expert per rank, to
# which 1,200 of the 2,400 rows go.
ALLGATHER_SHAPE = shape_of(4, ranks_per_node=2, num_experts=4, topk=2, tokens=600, hidden=500)


def allgather_us(cluster: Cluster) -> float:
    return stock_times_us(ALLGATHER_SHAPE, cluster, Training())["allgather"]


def test_collectives_of_stock_allgather_by_hand() -> None:
    """2 nodes of 2 ranks, an interface of 1 GB/s for each.

    A ring passes 3 of 4 shares through the network, half of each through either interface: per
    byte of a token 3 * 600 / 2 = 900 bytes, or 0.9 us. The node link is faster.
    """
    gathers_us = (4 + 4 * 4 + 500 * 2) * 0.9  # routing map, probabilities, rows
    in_fp32_us = 500 * 4 * 0.9  # the sums of combine; the gradients of its backward pass
    scatters_us = (500 * 2 + 4 * 4) * 0.9  # gradients of rows and of probabilities
    assert allgather_us(BY_HAND) == pytest.approx(
        gathers_us + 2 * in_fp32_us + scatters_us, abs=0.1
    )


def test_copies_of_stock_allgather_by_hand() -> None:
    """Instant links, memory of 1 GB/s: microseconds are thousands of bytes."""
    permute_us = 2 * 1200 * 1.0
    unpermute_us = (1200 + 2400) * 1.0  # outputs are read, the rows of all ranks written
    probs_us = 5 * 2400 * 4 / 1e3  # one expert's probabilities of all tokens
    zeros_us = 4 * 2400 * 4 / 1e3  # their gradients are put among those of 4 experts
    convert_us = (600 + 2400) * 500 * (2 + 4) / 1e3  # before and behind a collective in fp32
    dispatch_us = 6 * 2400 / 1e3 + permute_us + probs_us
    backward_us = probs_us + zeros_us + unpermute_us
    combine_us, combine_backward_us = unpermute_us + convert_us, permute_us + convert_us
    assert allgather_us(cluster_of(link(1e9), link(1e9), link(1.0), ranks=2)) == pytest.approx(
        dispatch_us + combine_us + combine_backward_us + backward_us, abs=0.1
    )
    # In one dtype nothing is converted.
    in_bf16 = replace(ALLGATHER_SHAPE, prob_bytes=2)
    steps = [
        step.traffic.stage for pass_ in FORWARD_BACKWARD for step in allgather_steps(in_bf16, pass_)
    ]
    assert "convert" not in steps


def test_the_host_of_stock_allgather_by_hand() -> None:
    """7 collectives of 10 us and 1 for each of 3 peers, 29 operations of 2, 2 waits of 100."""
    host = replace(
        INSTANT,
        collective_us=10.0,
        collective_peer_us=1.0,
        operation_us=2.0,
        counts_to_host_us=100.0,
        # Of our executor.
        counts_us=1e3,
        pass_us=1e3,
        stage_us=1e3,
    )
    cluster = cluster_of(*[link(1e9)] * 3, ranks=2, host=host)
    assert allgather_us(cluster) == pytest.approx(7 * (10 + 3 * 1) + 29 * 2 + 2 * 100, abs=0.1)
    # Behind the waits of dispatch the device is idle while the host launches; later the host is
    # ahead of it.
    slow = replace(cluster, memory=link(1.0))
    idle_us = 3 * (10 + 3 + 2) + 3 * 2 + (100 + 4 * 2) + (100 + 3 * 2)
    instant_us = allgather_us(replace(slow, host=INSTANT))
    assert allgather_us(slow) == pytest.approx(instant_us + idle_us, abs=0.1)


def test_the_host_is_ahead_by_what_the_device_has_left_to_do() -> None:
    """`alltoall` on one rank per node, 1 GB/s: its copies take no time, its collectives 1,000 us.

    A pass takes the host 100 us. It waits for the counts of the dispatch, and launches the other
    passes while the collective of the dispatch runs. If a pass takes it 1,500 us, a collective
    starts when the next pass has been reached.
    """
    cluster = replace(BY_HAND, ranks_per_node=1, nics_per_node=1)
    shape = shape_of(2, ranks_per_node=1, num_experts=2, topk=1, tokens=2000, hidden=500)
    for pass_us, total_us in ((100, 100 + 4 * 1000), (1500, 4 * 1500 + 1000)):
        host = replace(INSTANT, pass_us=pass_us)
        found = price(shape, replace(cluster, host=host), CHAINS["alltoall"], 1)
        assert found.total_us == pytest.approx(total_us, abs=10)
        assert sum(work.launch_us for work in found.works if work.resource == "host") == 4 * pass_us
    # On CPU ranks every pass waits.
    host = replace(INSTANT, pass_us=100)
    found = price(shape, replace(cluster, host=host, policy="host"), CHAINS["alltoall"], 1)
    assert found.total_us == pytest.approx(4 * (100 + 1000), abs=10)


def test_the_host_copies_the_counts_when_they_have_arrived() -> None:
    """They cross a network that takes 1,000 us to start; nothing hides the 700 us of the copy."""
    shape = shape_of(2, ranks_per_node=1, num_experts=4, topk=2, tokens=600, hidden=500)
    cluster = cluster_of(link(1.0, start_us=1000.0), link(10.0), link(1e9), ranks=1, nics=1)
    at_once, later = (
        price(
            shape,
            replace(cluster, host=replace(INSTANT, counts_to_host_us=counts_to_host_us)),
            CHAINS["alltoall"],
            1,
        )
        for counts_to_host_us in (0.0, 700.0)
    )
    assert later.total_us - at_once.total_us == pytest.approx(700)


def test_the_host_s_time_for_stages_counts_and_peers() -> None:
    """20 us for a collective and 1.5 for each peer, 2 for a stage's chunk, twice as fast."""
    host = replace(
        INSTANT,
        collective_us=40.0,
        collective_peer_us=3.0,
        stage_us=4.0,
        counts_to_host_us=30.0,
        counts_us=100.0,
        pass_us=20.0,
        speed=2.0,
    )
    cluster = replace(H100, host=host)
    found = price(shape_of(16), cluster, CHAINS["hierarchical_alltoall"], 4, "forward")
    launches_us: Counter[tuple[str, str]] = Counter()
    for work in found.works:
        # What is found before it is copied is one stage.
        launches_us[work.pass_name, work.stage] += work.launch_us
    dispatch = {stage: us for (name, stage), us in launches_us.items() if name == "dispatch"}
    assert dispatch == {
        AROUND_STAGES: 15 + 50 + 10,
        "count": 0,
        "exchange of counts": 20 + 15 * 1.5,
        "expert ids": 0,
        "copy per node": 2,
        "alltoall between nodes": 20 + 1 * 1.5 + 2,
        "copy per rank": 2,
        "alltoall in node": 20 + 7 * 1.5 + 2,
        "copy per expert": 2,
        "order": 2,
    }
    assert launches_us["combine", AROUND_STAGES] == 10


@pytest.mark.parametrize(("rates", "ranks"), [((1.0, 1e6), 8), ((1e6, 1.0), 7)])
def test_a_collective_on_two_resources_takes_the_slower_time(
    rates: tuple[float, float], ranks: int
) -> None:
    """A rank sends 512 rows to each of 8 ranks on the other node, and to each of 7 on its own."""
    cluster = cluster_of(*map(link, rates), link(1e6))
    found = price(shape_of(16, tokens=1024), cluster, CHAINS["alltoall"], 1, "forward")
    (exchange,) = works(found, "combine", "alltoall")
    assert exchange.times_us == pytest.approx([ranks * 512 * 8192 / 1e3])
    assert exchange.resource == "inter"


def test_a_group_that_crosses_nodes_is_priced_beside_others() -> None:
    """ETP 4 on nodes of 6: of ranks 0-3, 4-7 and 8-11 only those in the middle lie on two nodes."""
    shape = shape_of(3, 4, ranks_per_node=6, num_experts=12, topk=2)
    found = price(shape, H100, CHAINS["alltoall_allgather"], 1, "forward")
    resources = {work.stage: work.resource for work in works(found, "dispatch")}
    assert resources["allgather"] == "inter" and resources["alltoall"] == "inter"


def test_every_message_of_a_collective_starts_by_itself() -> None:
    """Each start takes 5 us of the link, each launch 10 us of the host."""
    host = replace(INSTANT, collective_us=10.0)
    for chain, policy, ranks_per_node, starts, launches in (
        # Rows and probabilities of `alltoall` in one chunk; behind a copy they share a message.
        ("alltoall", "streams", 8, 2, 2),
        ("alltoall_dedup", "streams", 8, 1, 1),
        # On CPU ranks they start together between nodes alone.
        ("alltoall", "host", 8, 2, 2),
        ("alltoall", "host", 1, 1, 2),
    ):
        links = [link(1e9, 5.0)] * 3
        cluster = cluster_of(*links, num_nodes=8, ranks=ranks_per_node, policy=policy, host=host)
        shape = shape_of(8, ranks_per_node=ranks_per_node)
        found = price(shape, cluster, CHAINS[chain], 1, "forward")
        (exchange,) = works(found, "dispatch", "alltoall")
        assert exchange.times_us == pytest.approx([starts * 5.0], abs=0.1)
        assert exchange.launch_us == launches * 10


def test_the_counts_of_a_chain_are_priced() -> None:
    """By hand, EP 16 over 2 nodes, 64 experts; to each rank a head of 5 and its 4 experts.

    With the hierarchy its node and the 8 ranks there too, for each of 8 blocks.
    """
    layout = layout_of(16, 1, 8, 64)
    # In 4 bytes each: to 7 ranks of this node, and to the 8 of the other one.
    for chain, size in (("alltoall", 5 + 4), ("hierarchical_alltoall", 8 * (5 + 4 + 1 + 8))):
        assert message_size((CHAINS[chain],), layout, 8) == size
        found = price(shape_of(16), H100, CHAINS[chain], 4, "forward")
        (work,) = works(found, "dispatch", "exchange of counts")
        assert work.traffic is not None and work.traffic.operation == "alltoall"
        moved = {name: moved.num_bytes.max() for name, moved in work.traffic.moved.items()}
        assert moved == {"intra": 7 * 4 * size, "inter": 8 * 4 * size}
