"""The choice: answers that are known, where they flip, and what a plan remembers."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from clusters import CONFIGS, LAUNCH, layout_of, link, preset, shape_of, with_link
from counted_routing import CountedRouting

from monta_megatron.chains import CHAINS
from monta_megatron.chains.counts import message_size
from monta_megatron.chains.program import Phase
from monta_megatron.common.rules import hash_of
from monta_megatron.core import Shape
from monta_megatron.planner import plan as planner_plan
from monta_megatron.planner import select
from monta_megatron.planner.chain_price import price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import with_inter_rate
from monta_megatron.planner.layout import ParallelLayout, exchanges, priced_ranks, shape_of_model
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.plan import Plan, plan
from monta_megatron.planner.routing.drawn import skewed_routing

A800 = preset("a800_2x8_ib200").with_kernels(fused=False)
H100 = preset("h100_8x_ndr").with_kernels(fused=False)
GB200 = preset("gb200_nvl72").with_kernels(fused=False)

Choose = Callable[[float], Plan]


@pytest.fixture
def without_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest is chosen, however plain the next."""
    monkeypatch.setattr(select, "MARGIN", 0.0)


no_margin = pytest.mark.usefixtures("without_margin")


def paper_shape(tokens: int = 1024) -> Shape:
    """The paper's layout: 2 experts, ETP 8 inside each of two nodes, EP 2 across."""
    model = load_model(CONFIGS / "models" / "monta_2x70b.yaml")
    return shape_of_model(model, layout_of(2, 8, 8, model.num_experts), tokens)


def with_overhead(cluster: Cluster, ratio: float) -> Cluster:
    """Starting anything takes `ratio` times as long."""
    for each in cluster.links:
        cluster = with_link(cluster, each.resource, alpha_us=each.alpha_us * ratio)
    launch = cluster.launch
    times = {
        name: ratio * us
        for name, us in vars(launch).items()
        if name.endswith("_us") and us is not None
    }
    return replace(cluster, launch=replace(launch, **times))


def test_top_1_in_one_node_is_a_plain_alltoall() -> None:
    for cluster in (A800, H100):
        assert plan(shape_of(8, topk=1), cluster).chain == "alltoall"


def test_expert_tensor_parallelism_pipelines_two_collectives() -> None:
    """From 2,048 tokens on; with fewer, the host takes longer for a chunk than the network."""
    for tokens in (2048, 8192):
        found = plan(paper_shape(tokens), A800)
        assert found.chain == "alltoall_allgather" and found.num_chunks > 1


def test_high_topk_over_two_nodes_is_hierarchical() -> None:
    for cluster in (A800, H100):
        found = plan(shape_of(16), cluster)
        assert found.chain.startswith("hierarchical") and found.num_chunks > 1


def assert_flips_once(values: Sequence[float], choose: Choose, first: str, last: str) -> None:
    """`first` up to some value, `last` from the next one on, and their times cross in between."""
    plans = [choose(value) for value in values]
    names = [found.chain for found in plans]
    flip = names.index(last)
    assert names == [first] * flip + [last] * (len(names) - flip) and flip > 0, names

    def best_us(found: Plan, chain: str) -> float:
        return min(
            entry.predicted_us
            for entry in found.candidates
            if entry.chain == chain and entry.predicted_us is not None
        )

    for index, found in enumerate(plans):
        is_first = best_us(found, first) <= best_us(found, last)
        assert is_first == (index < flip), f"at {values[index]}"


@no_margin
def test_more_experts_per_token_flip_it_to_one_copy_per_rank() -> None:
    assert_flips_once(
        [1, 2, 3, 4, 6, 8],
        lambda topk: plan(shape_of(8, topk=int(topk)), A800, chains=("alltoall", "alltoall_dedup")),
        "alltoall",
        "alltoall_dedup",
    )


@no_margin
def test_a_faster_network_flips_it_from_hierarchical_to_flat() -> None:
    assert_flips_once(
        [0.25, 0.5, 1, 2, 4, 8, 16, 32],
        lambda ratio: plan(
            shape_of(16),
            with_inter_rate(A800, ratio),
            chains=("hierarchical_alltoall", "alltoall_dedup"),
        ),
        "hierarchical_alltoall",
        "alltoall_dedup",
    )


@no_margin
def test_overhead_flips_it_from_pipelined_to_serial() -> None:
    values = [0, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64]
    plans = [plan(paper_shape(), with_overhead(A800, ratio)) for ratio in values]
    chunks = [found.num_chunks for found in plans]
    assert chunks == sorted(chunks, reverse=True) and chunks[0] == 8 and chunks[-1] == 1
    assert_flips_once(
        values,
        lambda ratio: plan(
            paper_shape(),
            with_overhead(A800, ratio),
            chains=("alltoall_allgather", "alltoall"),
            num_chunks=(4,),
        ),
        "alltoall_allgather",
        "alltoall",
    )


@no_margin
def test_more_bytes_take_more_chunks() -> None:
    chunks = [
        plan(shape_of(16, tokens=2**power), A800, chains=("hierarchical_alltoall",)).num_chunks
        for power in range(0, 17, 2)
    ]
    assert chunks == sorted(chunks) and chunks[0] == 1 and chunks[-1] == 8


@no_margin
def test_the_margin_goes_to_the_plainer_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = plan(shape_of(16), A800)
    for module in (planner_plan, select):
        monkeypatch.setattr(module, "MARGIN", 10.0)
    generous = plan(shape_of(16), A800)
    assert strict.predicted_us == min(
        entry.predicted_us for entry in strict.candidates if entry.predicted_us is not None
    )
    assert (generous.chain, generous.num_chunks) == ("alltoall", 1)


def test_every_candidate_is_there_with_its_reason() -> None:
    found = plan(shape_of(2, 8, num_experts=8, topk=2), A800)
    assert {entry.chain for entry in found.candidates} == set(CHAINS)
    assert [entry for entry in found.candidates if entry.rejected is None] == [
        entry
        for entry in found.candidates
        if (entry.chain, entry.num_chunks) == (found.chain, found.num_chunks)
    ]
    refused = [entry for entry in found.candidates if entry.predicted_us is None]
    assert {entry.chain for entry in refused} == {"alltoall_dedup", "hierarchical_alltoall"}
    assert all("expert_tensor_parallel_size is 8" in str(entry.rejected) for entry in refused)


def test_what_does_the_same_is_no_rival() -> None:
    found = plan(shape_of(8, num_experts=8, topk=2), H100)
    # At ETP 1 there is nothing to gather: in one chunk it is the plain alltoall.
    same = {
        (entry.chain, entry.num_chunks): entry.same_as
        for entry in found.candidates
        if entry.same_as
    }
    assert same == {("alltoall_allgather", 1): "alltoall in 1 chunk"}
    assert found.chain == "alltoall" and not found.reason.startswith("1.00x")


def test_bytes_are_those_of_all_ranks_by_resource() -> None:
    # A pair goes out with 4 bytes of probability and comes back without; 512 pairs for each rank,
    # of which 8 are on the other node and 7 on this one.
    found = plan(shape_of(16, tokens=1024), A800, chains=("alltoall",), phase="forward")
    (entry,) = found.candidates
    pair_bytes = 8196 + 8192
    assert entry.inter_bytes == 16 * 8 * 512 * pair_bytes
    assert entry.intra_bytes == 16 * 7 * 512 * pair_bytes


def test_stages_add_up_to_the_candidate() -> None:
    found = plan(shape_of(16), A800)
    (choice,) = (entry for entry in found.candidates if entry.rejected is None)
    of_counts = [stage for stage in found.stages if stage.stage == "exchange of counts"]
    for resource in ("inter_bytes", "intra_bytes"):
        total = sum(getattr(stage, resource) for stage in found.stages)
        total -= sum(getattr(stage, resource) for stage in of_counts)
        assert total == pytest.approx(getattr(choice, resource))


@pytest.mark.parametrize("phase", ["forward", "forward_backward"])
def test_the_host_s_time_around_the_stages_is_added(phase: Phase) -> None:
    """Every pass takes 10 us of it; dispatch takes 50 us more, to count, and nothing hides that."""
    without, found = (
        plan(
            shape_of(16),
            replace(A800, launch=replace(A800.launch, counts_us=counts_us, pass_us=pass_us)),
            phase=phase,
        )
        for counts_us, pass_us in ((0, 0), (50, 10))
    )
    assert (found.chain, found.num_chunks) == (without.chain, without.num_chunks)
    assert found.predicted_us == pytest.approx((without.predicted_us or 0) + 60)
    on_host = [stage.alone_us for stage in found.stages if stage.resource == "host"]
    assert on_host == [60, 10] if phase == "forward" else [60, 10, 10, 10]


def test_the_first_chunk_of_every_stage_takes_longer() -> None:
    """Dispatch of `allgather`: 100 us for a collective, 10 for a copy, 1 to find what is copied."""
    launch = replace(
        A800.launch, first_collective_us=100, first_copy_us=10, first_find_us=1, counts_us=0
    )
    without, found = (
        price_chain(shape_of(16), cluster, CHAINS["allgather"], 4, "forward")
        for cluster in (A800, replace(A800, launch=launch))
    )
    more_us: dict[str, np.ndarray] = {}
    for work, plain in zip(found.passes[0].works, without.passes[0].works, strict=True):
        more = np.subtract(work.times_us, plain.times_us)
        # What is found before it is copied is one stage.
        more_us[work.stage] = more_us.get(work.stage, 0.0) + more
    assert more_us == {
        "count": pytest.approx([1]),
        "exchange of counts": pytest.approx([100]),
        "expert ids": pytest.approx([1]),
        "allgather": pytest.approx([100, 0, 0, 0]),
        "copy per expert": pytest.approx([11, 0, 0, 0]),
        "order": pytest.approx([10, 0, 0, 0]),
    }


def test_the_host_s_time_for_stages_and_for_the_counts() -> None:
    """2 us for every chunk of a stage, and 15 for the counts of a dispatch, once."""
    launch = replace(LAUNCH, stage_us=2.0, counts_to_host_us=15.0)
    price = price_chain(
        shape_of(16), replace(A800, launch=launch), CHAINS["allgather"], 4, "forward"
    )
    for pass_ in price.passes:
        # What is found before it is copied is one stage.
        by_stage: Counter[str] = Counter()
        for work in pass_.pipeline:
            by_stage[work.stage] += work.launch_us
        assert set(by_stage.values()) == {2.0}
        for work in (*pass_.before, *pass_.after):
            assert work.launch_us == (15.0 if work.stage == "exchange of counts" else 0.0)


def test_uneven_nodes_and_routings_cost_what_the_busiest_does() -> None:
    # EP 3 on nodes of 2: no rails, the flat chains remain.
    uneven = plan(shape_of(3, ranks_per_node=2, num_experts=12, topk=2), A800)
    assert uneven.chain in ("alltoall", "alltoall_allgather", "alltoall_dedup", "allgather")
    even = plan(shape_of(16), A800, chains=("alltoall",))
    skewed = plan(shape_of(16, routing=skewed_routing(64, 8)), A800, chains=("alltoall",))
    assert skewed.predicted_us is not None and even.predicted_us is not None
    assert skewed.predicted_us > 1.1 * even.predicted_us


def test_ranks_that_share_a_nic_are_priced_together() -> None:
    """40 rows leave node 0 through its only interface: 30 of rank 0 and 10 of rank 1."""
    # Each rank's tokens: how many, and the expert, hence the rank, to which all of them go.
    maps = tuple(
        np.eye(4, dtype=bool)[[expert] * count]
        for expert, count in ((2, 30), (2, 10), (2, 5), (3, 5))
    )
    shape = shape_of(
        4,
        ranks_per_node=2,
        num_experts=4,
        topk=1,
        routing=CountedRouting(name="recorded", routing_maps=maps),
    )
    cluster = replace(
        H100,
        ranks_per_node=2,
        nics_per_node=1,
        launch=LAUNCH,
        links=(link("inter", 0.0, 1.0), link("intra", 0.0, 1e6), link("memory", 0.0, 1e6)),
    )
    dispatch, combine = price_chain(shape, cluster, CHAINS["alltoall"], 1, "forward").passes
    for pass_, row_bytes in ((dispatch, 8192 + 4), (combine, 8192)):
        (exchange,) = (work for work in pass_.pipeline if work.stage == "alltoall")
        # At 1 GB/s.
        assert exchange.times_us == pytest.approx([40 * row_bytes / 1e3], rel=1e-3)


@pytest.mark.parametrize(
    ("inter_gbytes_per_s", "intra_gbytes_per_s", "ranks"), [(1.0, 1e6, 8), (1e6, 1.0, 7)]
)
def test_a_collective_on_two_resources_takes_the_slower_time(
    inter_gbytes_per_s: float, intra_gbytes_per_s: float, ranks: int
) -> None:
    """A rank sends 512 rows to each of 8 ranks on the other node, and to each of 7 on its own."""
    cluster = replace(
        H100,
        launch=LAUNCH,
        links=(
            link("inter", 0.0, inter_gbytes_per_s),
            link("intra", 0.0, intra_gbytes_per_s),
            link("memory", 0.0, 1e6),
        ),
    )
    price = price_chain(shape_of(16, tokens=1024), cluster, CHAINS["alltoall"], 1, "forward")
    (exchange,) = (work for work in price.passes[1].pipeline if work.stage == "alltoall")
    assert exchange.times_us == pytest.approx([ranks * 512 * 8192 / 1e3])
    assert exchange.resource == "inter"


def test_one_chunk_wins_where_the_host_is_the_limit() -> None:
    """`hierarchical_alltoall` on an H100 preset, EP 16, 512 tokens of 4,096 values, by hand.

    An operation on tensors takes the host 10.3 us, a collective 89, a stage of a chunk 31.2. In
    every pass a chunk has two collectives and six stages, 2 x 89 + 6 x 31.2 = 365.2 us, and

        dispatch           lists 2 x 9, copies 11, duplicate 3 x 3, put 4: 42
        combine            sums of two blocks of columns 3 x 8, put 1: 25
        combine backward   duplicate 3 x 1, put 1: 4
        dispatch backward  sums with probabilities 3 x 11, put 2: 35

    operations, and a pass allocates two messages, for all chunks at once: a quarter of that for
    each of four. Together 106 + 2: a chunk takes 4 x 365.2 + 108 x 10.3 = 2,573 us. All that it
    moves over the network, 4.2 MB per pass at 47 GB/s, takes 4 x 90: no overlap can win back a
    chunk. A combine begins with what the dispatch left, the backward passes with what each left the
    other, so the host is the limit of all together.
    """
    launch = replace(LAUNCH, operation_us=10.3, collective_us=89, stage_us=31.2)
    cluster = replace(H100, launch=launch)
    shape = shape_of(16, tokens=512)
    one, four = (
        price_chain(shape, cluster, CHAINS["hierarchical_alltoall"], chunks, "forward_backward")
        for chunks in (1, 4)
    )
    operations = (42, 25, 4, 35)
    for pass_, num_operations in zip(four.passes, operations, strict=True):
        per_chunk_us = sum(work.launch_us for work in pass_.pipeline)
        assert per_chunk_us == pytest.approx((num_operations + 0.5) * 10.3 + 365.2)
    host_us = [sum(pass_.busy_us("host") for pass_ in each.passes[2:]) for each in (one, four)]
    for each, backward_us in zip((one, four), host_us, strict=True):
        assert sum(pass_.total_us for pass_ in each.passes[2:]) == pytest.approx(
            backward_us, rel=0.02
        )
    # All chunks but one, less what four of them hide.
    more_us = 3 * (sum(operations) * 10.3 + 4 * 365.2)
    network_us = sum(
        sum(work.times_us)
        for pass_ in one.passes
        for work in pass_.pipeline
        if work.resource == "inter"
    )
    assert network_us == pytest.approx(4 * (30 + 90), rel=0.02)
    assert more_us - network_us < four.total_us - one.total_us < more_us
    # By the host's time alone: the device's would have it in chunks.
    fewer = shape_of(16, tokens=384)
    chosen = plan(fewer, cluster)
    assert (chosen.chain, chosen.num_chunks) == ("alltoall", 1)
    without = plan(fewer, replace(H100, launch=LAUNCH))
    assert without.chain == "hierarchical_alltoall" and without.num_chunks > 1


def test_no_tokens_at_all_can_be_planned() -> None:
    assert plan(shape_of(16, tokens=0), A800).num_chunks == 1


def test_the_hash_of_a_rule_is_the_same_in_every_process() -> None:
    rule = {"chain": "auto", "chains": ["alltoall", "allgather"], "num_chunks": [1, 2]}
    code = f"from monta_megatron.common.rules import hash_of; print(hash_of({rule!r}))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert outputs == {str(hash_of(rule))} and 0 <= hash_of(rule) < 2**63
    assert hash_of({**rule, "num_chunks": [1]}) != hash_of(rule)


# EP 256 on racks of 72: 32 ranks, 3 x 72, and 8.
@pytest.mark.parametrize(("cluster", "ep", "pattern"), [(H100, 64, 0), (GB200, 256, 1)])
def test_4096_ranks_are_planned_at_once(cluster: Cluster, ep: int, pattern: int) -> None:
    model = load_model(CONFIGS / "models" / "deepseek_v3.yaml")
    layout = ParallelLayout(world_size=4096, ep=ep)
    times = []
    for _ in range(10):
        priced_ranks.cache_clear()
        start = time.process_time()
        place = exchanges(layout, model.num_experts, cluster.ranks_per_node)[pattern]
        plan(shape_of_model(model, place, layout.tokens_per_rank(model)), cluster)
        times.append(time.process_time() - start)
    # Of this process alone. 29 ms and 37 ms where this was written (50 are promised); the rest is
    # for slower machines.
    assert min(times) < 0.150


def test_exchanges_that_lie_differently_on_the_nodes() -> None:
    (even,) = exchanges(ParallelLayout(world_size=32, ep=16), 64, 8)
    assert even.nodes == (0,) * 8 + (1,) * 8
    # Six consecutive ranks on nodes of 4: 4 + 2, then 2 + 4.
    assert [place.nodes for place in exchanges(ParallelLayout(world_size=12, ep=6), 6, 4)] == [
        (0, 0, 0, 0, 1, 1),
        (0, 0, 1, 1, 1, 1),
    ]
    # An exchange that is part of a node: two of them in one.
    (half,) = exchanges(ParallelLayout(world_size=16, ep=2, etp=2), 4, 8)
    assert half.nodes == (0, 0, 0, 0)


def test_a_group_that_crosses_nodes_is_priced_beside_others() -> None:
    """ETP 4 on nodes of 6: of ranks 0-3, 4-7 and 8-11 only those in the middle lie on two nodes."""
    shape = shape_of(3, 4, ranks_per_node=6, num_experts=12, topk=2)
    price = price_chain(shape, H100, CHAINS["alltoall_allgather"], 1, "forward")
    resources = {work.stage: work.resource for work in price.passes[0].pipeline}
    assert resources["allgather"] == "inter" and resources["alltoall"] == "inter"


def test_every_message_of_a_collective_starts_by_itself() -> None:
    """Rows and probabilities of `alltoall` in one chunk; behind a copy they share a message."""
    cluster = replace(
        H100,
        launch=replace(LAUNCH, collective_us=10.0),
        links=tuple(replace(each, alpha_us=5.0) for each in H100.links),
    )
    rows_only, both = (
        price_chain(shape_of(8), cluster, CHAINS["alltoall"], 1, "forward").passes[number]
        for number in (1, 0)
    )
    less, more = (
        next(work for work in pass_.pipeline if work.stage == "alltoall")
        for pass_ in (rows_only, both)
    )
    assert (less.launch_us, more.launch_us) == (10, 20)
    # 4,096 tokens, 8 probabilities of 4 bytes each, of which 7 in 8 go to others, at 335 GB/s.
    probs_us = 4096 * 8 * 4 * 7 / 8 / 335e3
    assert more.times_us[0] - less.times_us[0] == pytest.approx(5 + probs_us)
    (packed,) = (
        work
        for work in price_chain(shape_of(8), cluster, CHAINS["alltoall_dedup"], 1, "forward")
        .passes[0]
        .pipeline
        if work.stage == "alltoall"
    )
    assert packed.launch_us == 10


@pytest.mark.parametrize(("ranks_per_node", "starts"), [(4, 2), (1, 1)])
def test_messages_of_cpu_ranks_start_together_only_between_nodes(
    ranks_per_node: int, starts: int
) -> None:
    """Rows and probabilities of `alltoall` in one chunk, on one node and on four."""
    cluster = replace(
        H100,
        ranks_per_node=ranks_per_node,
        nics_per_node=ranks_per_node,
        launch=LAUNCH,
        copies_block_host=True,
        links=tuple(link(resource, 5.0, 1e9) for resource in ("inter", "intra", "memory")),
    )
    shape = shape_of(4, ranks_per_node=ranks_per_node)
    price = price_chain(shape, cluster, CHAINS["alltoall"], 1, "forward")
    (exchange,) = (work for work in price.passes[0].pipeline if work.stage == "alltoall")
    assert exchange.times_us == pytest.approx([starts * 5.0], abs=0.1)


def test_auto_prices_the_counts_of_every_chain() -> None:
    """By hand, EP 16 over 2 nodes, 64 experts; to each rank a head of 5 and its 4 experts.

    With the hierarchy its node and the 8 ranks there too, for each of 8 blocks.
    """
    chains = [CHAINS[name] for name in ("alltoall", "hierarchical_alltoall")]
    layout = layout_of(16, 1, 8, 64)
    assert message_size(chains, layout, 8) == 8 * (5 + 4 + 1 + 8)
    assert message_size(chains[:1], layout, 8) == 5 + 4
    # In 4 bytes each: to 7 ranks of this node, and to the 8 of the other one.
    for chain, size in (("alltoall", 9), ("hierarchical_alltoall", 8 * 18)):
        price = price_chain(shape_of(16), A800, CHAINS[chain], 4, "forward")
        (stage,) = (each for each in price.traffic[0].stages if each.stage == "exchange of counts")
        assert stage.operation == "alltoall"
        moved = {name: moved.num_bytes.max() for name, moved in stage.moved.items()}
        assert moved == {"intra": 7 * 4 * size, "inter": 8 * 4 * size}
