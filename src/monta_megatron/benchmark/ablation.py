"""The dispatchers of the ablation's steps; see ablation_steps.py for what they are."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from monta_megatron.benchmark import traffic
from monta_megatron.benchmark.ablation_steps import CHAIN, FIXED_NUM_CHUNKS
from monta_megatron.benchmark.candidates import Candidate, build_dispatcher, stock_candidate
from monta_megatron.benchmark.settings import Settings
from monta_megatron.benchmark.workload import Batch, concatenate, make_batch
from monta_megatron.chains.chain import order_of_issue
from monta_megatron.dtypes import DTYPE_BYTES
from monta_megatron.integration.bench_layer import LayerShape, whole_group_dispatcher
from monta_megatron.planner.cluster import Cluster
from monta_megatron.topology.layout import Layout


def order_with_places_apart(depths: Sequence[int], num_chunks: int) -> list[tuple[int, int]]:
    """The usual order, with every first stage moved to the front and every last one to the end.

    The last chunk goes first at both ends: at the beginning, so that the first collective waits
    for all copies; at the end, so that the first copy waits for the last collective.
    """
    order = order_of_issue(depths, num_chunks)
    last = len(depths) - 1
    return [
        *((0, chunk) for position, chunk in reversed(order) if position == 0),
        *((position, chunk) for position, chunk in order if 0 < position < last),
        *((last, chunk) for position, chunk in reversed(order) if position == last),
    ]


def build_ablation(
    settings: Settings, cluster: Cluster | None, shape: LayerShape, layout: Layout, batch: Batch
) -> list[Candidate]:
    """Stock alltoall, the baseline of the checks and ratios, followed by the steps."""
    device = batch.hidden.device
    # ETP = TP, so a tensor parallel group is a run of consecutive ranks, which hold the parts of
    # the same experts.
    rank = torch.distributed.get_rank()
    first = rank - rank % settings.tp
    group_batch = concatenate(
        [make_batch(settings, layout, each, device) for each in range(first, first + settings.tp)]
    )
    begin = (rank - first) * settings.tokens
    whole_group = Candidate(
        kind="megatron",
        requested="alltoall",
        dispatcher=whole_group_dispatcher(shape),
        batch=group_batch,
        own_tokens=slice(begin, begin + settings.tokens),
        traffic=functools.partial(
            traffic.stock_alltoall_of_whole_group,
            layout,
            group_batch.routing_map.cpu().numpy(),
            settings.hidden,
            DTYPE_BYTES[settings.dtype],
        ),
        step=0,
    )
    ours = [
        Candidate(
            kind="monta",
            requested=CHAIN,
            dispatcher=build_dispatcher(settings, cluster, shape, CHAIN, num_chunks),
            batch=batch,
            step={1: 1, FIXED_NUM_CHUNKS: 3}.get(num_chunks),
        )
        for num_chunks in sorted({1, FIXED_NUM_CHUNKS, *settings.num_chunks})
    ]
    # The same chain, but no Place overlaps a collective.
    places_apart = build_dispatcher(settings, cluster, shape, CHAIN, FIXED_NUM_CHUNKS)
    bind = places_apart._bind
    places_apart._bind = lambda *counts: replace(bind(*counts), order=order_with_places_apart)
    ours.append(
        Candidate(kind="monta", requested=CHAIN, dispatcher=places_apart, batch=batch, step=2)
    )
    return [stock_candidate(settings, shape, layout, batch, "alltoall"), whole_group, *ours]
