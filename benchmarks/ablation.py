r"""The ablation of the MoNTA paper (arXiv 2411.00662), at ETP = TP: its ideas one by one.

    0  every tensor-parallel rank sends the tokens of its whole group
    1  duplicates dropped: each sends its own; A2A, then AG, then Permute
    2  + A2A and AG of neighbouring chunks overlap
    3  + Permute overlaps too
    4  + the number of chunks is chosen

Step 0 is Megatron without sequence parallelism, with stock's alltoall dispatcher. It moves TP
times the bytes between nodes, and nothing has to be gathered inside a node; the partial outputs are
summed once, per token rather than per token-expert pair, which is where the sum is cheapest.

Takes the flags of `sweep.py`, and like it one process per rank:

    monta emulate --nodes 2 --ranks-per-node 8 --inter-mbit 200 -- \
        benchmarks/ablation.py --sweep docs/benchmarks/ablation_2x8.yaml --out ablation.jsonl
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from sweep import Study, start

from monta_megatron.chains import BoundChain, lower
from monta_megatron.chains.chain import order_of_issue
from monta_megatron.chains.program import BoundProgram, Program
from monta_megatron.common.errors import UserError
from monta_megatron.common.text import counted, table
from monta_megatron.core import Choice
from monta_megatron.exchange import buffers
from monta_megatron.tools.bench.candidates import (
    Batch,
    Bench,
    BenchCandidate,
    build_dispatcher,
    make_batch,
    monta_candidate,
    stock_candidate,
)
from monta_megatron.tools.bench.report import Row
from monta_megatron.tools.bench.settings import Settings

CHAIN = "alltoall_allgather"
# The number that the paper's published code always uses.
FIXED_NUM_CHUNKS = 4

STEPS = {
    0: "every TP rank sends its group's tokens",
    1: "duplicates dropped, A2A then AG then Permute",
    2: f"A2A and AG pipelined, {FIXED_NUM_CHUNKS} chunks",
    3: "Permute pipelined too",
    4: "the fastest number of chunks",
}


def build(bench: Bench) -> Bench:
    """Add stock alltoall, the baseline of the checks and ratios, then the steps, 2 as the last one.

    Raises:
        UserError: a flag that the steps do not allow.
    """
    settings, batch = bench.settings, bench.batch
    check(settings)
    # ETP = TP, so a tensor parallel group is a run of consecutive ranks, which hold the parts of
    # the same experts.
    rank = dist.get_rank()
    first = rank - rank % settings.tp
    device = batch.hidden.device
    group_batch = concatenate(
        [make_batch(settings, peer, device) for peer in range(first, first + settings.tp)]
    )
    begin = (rank - first) * settings.tokens
    whole_group = BenchCandidate(
        kind="megatron",
        requested=Choice(chain="alltoall", num_chunks=1),
        dispatcher=whole_group_dispatcher(settings),
        batch=group_batch,
        tokens_here=slice(begin, begin + settings.tokens),
    )
    # The last one is the same chain, but no Permute of it overlaps a collective.
    numbers = [*sorted({1, FIXED_NUM_CHUNKS, *settings.num_chunks}), FIXED_NUM_CHUNKS]
    ours = [monta_candidate(bench, Choice(chain=CHAIN, num_chunks=n)) for n in numbers]
    layout_of_last = ours[-1].dispatcher.setup.layout

    def lower_in_order(bound: BoundChain, *arguments: Any) -> BoundProgram:
        usual = lower.lower(bound, *arguments)
        if bound.layout is not layout_of_last:
            return usual
        pass_, row, _, policy = arguments
        return usual._replace(program=with_permutes_apart(bound.shape, pass_, row, policy))

    buffers.lower = lower_in_order  # type: ignore[assignment]
    return replace(bench, candidates=[stock_candidate(bench, "alltoall"), whole_group, *ours])


def check(settings: Settings) -> None:
    """Refuse flags that the steps do not allow.

    Raises:
        UserError: names the flag, the value and the rule.
    """
    tp, etp = settings.tp, settings.etp
    if not settings.skip_incompatible:
        raise UserError(f"--chains: got {','.join(settings.chains)}, must be left out here")
    if tp == 1:
        raise UserError("--tp: got 1, must be above 1, to have tensor-parallel duplicates")
    if etp != tp:
        raise UserError(f"--etp: got {etp}, must be equal to --tp ({tp})")


@functools.cache
def with_permutes_apart(*structure: Any) -> Program:
    """The program of a pass; see `order_with_permutes_apart`."""
    with mock.patch.object(lower, "order_of_issue", order_with_permutes_apart):
        return lower._structure.__wrapped__(*structure)


def order_with_permutes_apart(offsets: Sequence[int], num_chunks: int) -> list[tuple[int, int]]:
    """The usual order, with every first stage moved to the front and every last one to the end.

    The last chunk goes first at both ends: at the beginning, so that the first collective waits
    for all copies; at the end, so that the first copy waits for the last collective.
    """
    order = order_of_issue(offsets, num_chunks)
    last = len(offsets) - 1
    return [
        *((0, chunk) for position, chunk in reversed(order) if position == 0),
        *((position, chunk) for position, chunk in order if 0 < position < last),
        *((last, chunk) for position, chunk in reversed(order) if position == last),
    ]


class WholeGroupTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Stock's alltoall in a layer without sequence parallelism.

    Every tensor parallel rank holds the tokens of its whole group, and sends all of them to those
    parts of the experts that have its own position in the expert tensor parallel groups. Megatron's
    conjugate operators around the layer sum the parts: outputs in forward, gradients in backward.
    """

    def __init__(self, *args: Any, parts_group: dist.ProcessGroup, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts_group = parts_group

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as stock does; backward adds up the gradients of the parts."""
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states, self._parts_group)
        probs = copy_to_tensor_model_parallel_region(probs, self._parts_group)
        return super().dispatch_preprocess(hidden_states, routing_map, probs)

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Do as stock does, then add up the parts."""
        output = super().combine_postprocess(permutated_local_input_tokens)
        return reduce_from_tensor_model_parallel_region(output, self._parts_group)


def whole_group_dispatcher(settings: Settings) -> Any:
    """Step 0 of the ablation: every rank sends the tokens of its whole tensor parallel group."""
    groups = get_default_pg_collection()
    parts_group = groups.expt_tp
    # No gather inside the group: every rank has all that its part of an expert needs.
    groups.expt_tp, groups.tp_ep = None, groups.ep
    dispatcher_class = functools.partial(WholeGroupTokenDispatcher, parts_group=parts_group)
    return build_dispatcher(dispatcher_class, settings, groups)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """The tokens of several ranks, one after the other."""
    names = [entry.name for entry in fields(Batch)]
    return Batch(**{name: torch.cat([getattr(batch, name) for batch in batches]) for name in names})


def steps_of(rows: Sequence[Row]) -> list[Row]:
    """The row of every step.

    Args:
        rows: of `build`'s candidates in one phase, in their order.
    """
    _, whole_group, *ours, permutes_apart = rows
    by_chunks = {row.num_chunks: row for row in ours}
    fastest = min(ours, key=lambda row: row.median_ms)
    return [whole_group, by_chunks[1], permutes_apart, by_chunks[FIXED_NUM_CHUNKS], fastest]


def ablation_text(reports: Sequence[Mapping[str, Any]]) -> str:
    """A table of the steps for each layout and phase."""
    tables = []
    for report in reports:
        rows = [Row(**fields) for fields in report["rows"]]
        for phase in report["meta"]["settings"]["phase"]:
            of_phase = [row for row in rows if (row.scope, row.phase) == ("exchange", phase)]
            tables.append(_table(report["meta"], steps_of(of_phase)))
    return "\n\n".join(tables)


def _table(meta: Mapping[str, Any], rows: Sequence[Row]) -> str:
    settings, nodes, first = meta["settings"], meta["nodes"], rows[0]
    rate = "" if first.inter_mbit is None else f", {first.inter_mbit:g} Mbit/s"
    title = (
        f"{counted(len(nodes), 'rank')} on {counted(len(set(nodes)), 'node')}{rate}, "
        f"TP {first.tp}, EP {first.ep}, {settings['experts']} experts, top-{first.top_k}, "
        f"H {settings['hidden']:,}, {counted(first.tokens, 'token')} per rank, "
        f"{first.phase.replace('_', ' + ')}:"
    )
    cells = [
        (
            *(step, what, row.num_chunks, f"{row.median_ms:.1f}"),
            f"{before.median_ms / row.median_ms:.2f}",
            f"{first.median_ms / row.median_ms:.2f}",
        )
        for (step, what), row, before in zip(STEPS.items(), rows, [first, *rows[:-1]], strict=True)
    ]
    return table(["step", "what", ">chunks", ">ms", ">gain", ">over 0"], cells, title)


STUDY = Study(name="ablation", description=__doc__, build=build, text=ablation_text)

if __name__ == "__main__":
    sys.exit(start(STUDY))
