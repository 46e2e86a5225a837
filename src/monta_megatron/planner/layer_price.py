"""Price of a layer with its experts: one call between the passes, or chunk by chunk among them.

In the pipeline a direction is one program (`chains.pipelined_layer`), priced as a pass is: its
operations through the same curves, the experts as one more resource, all by the same schedule.

Notation: C = number of chunks, S = the ranks that are priced.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from monta_megatron.chains import Chain
from monta_megatron.chains.alltoall import ALLTOALL
from monta_megatron.chains.chain import TokenCounts, blocks_for
from monta_megatron.chains.layout import Layout
from monta_megatron.chains.pipelined_layer import BoundLayer, blocks_of_chunks, layer_program
from monta_megatron.chains.program import (
    COMBINE,
    COMBINE_BACKWARD,
    DISPATCH,
    DISPATCH_BACKWARD,
    Pass,
    Phase,
    Policy,
)
from monta_megatron.planner.chain_price import ChainPrice
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.experts import Experts
from monta_megatron.planner.layout import PricedRanks, priced_ranks
from monta_megatron.planner.pricing import NOT_YET, PassPrice, with_leads, work_of
from monta_megatron.planner.schedule import Work
from monta_megatron.planner.traffic import (
    PassTraffic,
    StageTraffic,
    num_host_operations,
    pass_traffic,
)
from monta_megatron.planner.workload import Workload

EXPERTS = StageTraffic(stage="experts", operation="copy", resource="compute", moved={})
# The two passes of a direction.
DIRECTIONS: dict[Phase, tuple[tuple[Pass, Pass], ...]] = {
    "forward": ((DISPATCH, COMBINE),),
    "forward_backward": ((DISPATCH, COMBINE), (COMBINE_BACKWARD, DISPATCH_BACKWARD)),
}


def with_experts(
    prices: Sequence[ChainPrice], workload: Workload, cluster: Cluster, phase: Phase
) -> list[ChainPrice]:
    """Prices of exchanges as those of layers, and in the pipeline where that can be.

    Args:
        prices: of exchanges.
        workload: the exchange and its experts.
        cluster: the cluster it runs on.
        phase: that was priced.
    """
    ranks = priced_ranks(workload.layout, workload.routing, cluster.ranks_per_nic)
    rows = max(workload.bind(ALLTOALL, 1, layout).num_expert_rows for layout in ranks.layouts)
    split = [
        _pipelined(price, workload, cluster, ranks, phase)
        for price in prices
        if price.chain.rows == "tokens" and price.num_chunks > 1
    ]
    unsplit = [_unsplit(price, _experts_of(workload), rows, cluster) for price in prices]
    return [*unsplit, *split]


def bound_layers(
    workload: Workload, chain: Chain, num_chunks: int, layout: Layout, policy: Policy, phase: Phase
) -> list[BoundLayer]:
    """The program of each direction of a layer with its experts in the pipeline, on one rank.

    Args:
        workload: the exchange and its experts.
        chain: that runs.
        num_chunks: C.
        layout: the exchange as the rank sees it.
        policy: how programs are executed.
        phase: whether there is a backward direction.
    """
    num_blocks = blocks_for(num_chunks)
    counts = workload.routing.counts(chain, layout, workload.tokens_per_rank, num_blocks)
    assert isinstance(counts, TokenCounts), f"{chain.name} cannot be split with its experts"
    chunks = tuple(
        chain.bind(layout, counts.of_blocks(*blocks), 1)
        for blocks in blocks_of_chunks(num_blocks, num_chunks)
    )
    in_background = _experts_of(workload).in_background
    layers = []
    for passes in DIRECTIONS[phase]:
        first, second = (workload.lower(chunks[0], pass_, policy) for pass_ in passes)
        layers.append(
            BoundLayer(
                layer=layer_program(first.program, second.program, num_chunks, in_background),
                chunks=chunks,
                max_experts_per_token=first.max_experts_per_token,
            )
        )
    return layers


def _experts_of(workload: Workload) -> Experts:
    assert workload.experts is not None, "it has experts with a price"
    return workload.experts


def _unsplit(price: ChainPrice, experts: Experts, rows: float, cluster: Cluster) -> ChainPrice:
    """With one call of the experts behind dispatch, and behind combine's backward."""
    passes, traffic = list(price.passes), list(price.traffic)
    names = [of_pass.pass_name for of_pass in passes]
    for pass_ in (DISPATCH, COMBINE_BACKWARD):
        if pass_.name not in names:
            continue
        at = names.index(pass_.name)
        of_pass, of_traffic = passes[at], traffic[at]
        time_us = experts.time_us(rows, backward=pass_ is COMBINE_BACKWARD)
        work = Work(
            stage=EXPERTS.stage,
            resource="compute",
            times_us=(time_us,),
            launch_us=experts.launch_us,
        )
        passes[at] = replace(of_pass, after=(*of_pass.after, work))
        traffic[at] = replace(of_traffic, after=(*of_traffic.after, EXPERTS))
    led = with_leads(passes, cluster.factor, price.overlapped_compute_us / len(passes))
    return replace(price, passes=led, traffic=tuple(traffic))


def _pipelined(
    price: ChainPrice, workload: Workload, cluster: Cluster, ranks: PricedRanks, phase: Phase
) -> ChainPrice:
    """The same chain in as many chunks, each of them with its experts."""
    # [S][directions]
    layers = [
        bound_layers(workload, price.chain, price.num_chunks, layout, cluster.policy, phase)
        for layout in ranks.layouts
    ]
    overlapped_compute_us = price.overlapped_compute_us / len(DIRECTIONS[phase])
    priced = [
        _direction(of_ranks, price, workload, cluster, ranks.nic_starts)
        for of_ranks in zip(*layers, strict=True)
    ]
    return replace(
        price,
        passes=with_leads(
            [of_pass for of_pass, _ in priced], cluster.factor, overlapped_compute_us
        ),
        traffic=tuple(of_traffic for _, of_traffic in priced),
        peak_bytes=max(
            layer_peak_bytes(layer, _experts_of(workload).gradient_bytes)
            for of_rank in layers
            for layer in of_rank
        ),
        experts_pipelined=True,
    )


def _direction(
    layers: Sequence[BoundLayer],
    price: ChainPrice,
    workload: Workload,
    cluster: Cluster,
    nic_starts: Sequence[int],
) -> tuple[PassPrice, PassTraffic]:
    """A direction's price, and its traffic.

    Args:
        layers: [S] its program with the rows of each rank.
        price: of the exchange in as many chunks.
        workload, cluster: see `with_experts`.
        nic_starts: see `pricing.price_pass`.
    """
    layer, launch, experts = layers[0].layer, cluster.host, _experts_of(workload)
    program, is_forward = layer.program, layer.first.pass_.ids
    order = [operation.chunk for operation in program.operations if operation.kind == "experts"]
    # Step 1: each pass of the chunks, which are passes of their own to the host.
    notes: dict[str, None] = {}
    moved: list[list[StageTraffic]] = []
    works: list[list[Work]] = []
    for half in (layer.first, layer.second):
        of_chunks = [
            pass_traffic([each.of_chunk(chunk, half) for each in layers], 0, 0).pipeline
            for chunk in order
        ]
        moved.append([_joined(stages) for stages in zip(*of_chunks, strict=True)])
        works.append(
            [
                work_of(
                    stage,
                    num_host_operations(series[0].kind, half.pass_, half.row, half.policy),
                    cluster,
                    nic_starts,
                    launch.stage_us,
                    notes,
                )
                for stage, series in zip(moved[-1], half.series, strict=True)
            ]
        )
        if works[-1]:
            begin = works[-1][0]
            works[-1][0] = replace(begin, launch_us=begin.launch_us + launch.pass_us)
    # Step 2: the experts between them.
    rows = [max(each.chunks[chunk].num_expert_rows for each in layers) for chunk in order]
    computed = Work(
        stage=EXPERTS.stage,
        resource="compute",
        times_us=tuple(experts.time_us(of_chunk, not is_forward) for of_chunk in rows),
        launch_us=experts.launch_us,
    )
    # Step 3: the work around them.
    pipeline = (*works[0], computed, *works[1])
    of_pass = PassPrice(
        program=program,
        host_us=launch.counts_us if is_forward else 0.0,
        before=price.passes[0].before if is_forward else (),
        pipeline=pipeline,
        after=(),
        schedule=NOT_YET,
        notes=tuple(notes),
    )
    traffic = PassTraffic(
        before=price.traffic[0].before if is_forward else (),
        pipeline=(*moved[0], EXPERTS, *moved[1]),
        after=(),
    )
    return of_pass, traffic


def _joined(stages: Sequence[StageTraffic]) -> StageTraffic:
    """A stage of several chunks as one of a program in as many."""
    return replace(
        stages[0],
        moved={
            resource: moved._replace(
                num_bytes=np.concatenate([of.moved[resource].num_bytes for of in stages], axis=-1)
            )
            for resource, moved in stages[0].moved.items()
        },
    )


def layer_peak_bytes(bound: BoundLayer, gradient_bytes: float = 0.0) -> float:
    """The most that a direction holds at once on a rank, beyond its input.

    Of the tensors that the experts keep for backward, only rows are counted.

    Args:
        bound: the direction.
        gradient_bytes: see `Experts`.
    """
    program = bound.program
    # Buffers of one slot use the same memory, one after the other.
    held: dict[int, tuple[float, int, int]] = {}
    for buffer, lifetime in zip(program.buffers, bound.layer.lifetimes, strict=True):
        if lifetime is None:
            continue
        num_bytes, begin, end = held.get(buffer.slot, (0.0, *lifetime))
        held[buffer.slot] = (
            max(
                num_bytes,
                sum(buffer.message_bytes(bound.max_experts_per_token)) * bound.rows(buffer),
            ),
            min(begin, lifetime[0]),
            max(end, lifetime[1]),
        )
    changes = [0.0] * (len(program.operations) + 1)
    if not bound.layer.first.pass_.ids:
        computed = [one.number for one in program.operations if one.kind == "experts"]
        held[-1] = (gradient_bytes, computed[0], computed[-1])
    for num_bytes, begin, end in held.values():
        changes[begin] += num_bytes
        changes[end + 1] -= num_bytes
    return max(accumulate(changes))
