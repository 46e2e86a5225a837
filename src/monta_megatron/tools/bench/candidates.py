"""The dispatchers to compare, and how one of them runs.

Notation: T = tokens of a rank, H = hidden size, E = experts, N = rows for the local experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from monta_megatron.chains import program
from monta_megatron.common.ranks import consecutive_nodes
from monta_megatron.core import Layout
from monta_megatron.emulation.cluster import EmulatedCluster, default_costs
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.integration.dispatcher import MontaTokenDispatcher
from monta_megatron.integration.options import AUTO
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools.bench.layer import STOCK_DISPATCHERS, TimedExperts, build_dispatcher
from monta_megatron.tools.bench.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs of one rank's dispatcher.

    Attributes:
        hidden: [T, 1, H].
        routing_map: [T, E] bool.
        probs: [T, E] fp32, 0 where not routed.
        output_gradient: [T, 1, H].
    """

    hidden: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor
    output_gradient: torch.Tensor


def make_batch(settings: Settings, rank: int, device: torch.device) -> Batch:
    """The batch of any rank of the launch."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + rank)
    hidden, output_gradient = (
        torch.randn(settings.tokens, 1, settings.hidden, generator=generator) for _ in range(2)
    )
    chosen = draw_experts(settings, generator)
    weights = chosen * torch.rand(chosen.shape, generator=generator)
    dtype = getattr(torch, settings.dtype)
    return Batch(
        hidden=hidden.to(device, dtype),
        routing_map=chosen.to(device),
        probs=(weights / weights.sum(dim=1, keepdim=True)).to(device),
        output_gradient=output_gradient.to(device, dtype),
    )


def draw_experts(settings: Settings, generator: torch.Generator) -> torch.Tensor:
    """[T, E] bool, the experts of a rank's tokens.

    uniform     any experts
    skewed      the i-th most wanted expert is drawn with weight 1/i, in the seed's order
    """
    weights = torch.ones(settings.experts)
    if settings.routing == "skewed":
        of_all_ranks = torch.Generator().manual_seed(settings.seed)
        weights /= 1 + torch.randperm(settings.experts, generator=of_all_ranks)
    drawn = torch.multinomial(
        weights.expand(settings.tokens, -1), settings.top_k, generator=generator
    )
    return torch.zeros(settings.tokens, settings.experts, dtype=torch.bool).scatter(1, drawn, True)


@dataclass(frozen=True, kw_only=True)
class BenchCandidate:
    """One dispatcher, with the data that it runs on.

    Attributes:
        kind: whose dispatcher it is.
        requested: stock's dispatcher or our chain, as asked for; `AUTO` where the planner chooses.
        dispatcher: an object with Megatron's six phases.
        batch: its inputs.
        tokens_here: position of this rank's tokens in them.
        overlaps: whether the experts may run inside its pipeline.
    """

    kind: Literal["megatron", "monta"]
    requested: str
    dispatcher: Any
    batch: Batch
    tokens_here: slice = slice(None)
    overlaps: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """The chain that runs and its number of chunks; for "auto", known only after a run."""
        if self.kind == "megatron":
            return self.requested, 1
        choice = self.dispatcher.choice
        return choice.chain, choice.num_chunks


@dataclass(frozen=True, kw_only=True)
class Bench:
    """An exchange, its data, and the dispatchers on them, as this rank sees them.

    Attributes:
        settings: of the benchmark.
        cluster: costs for predictions, or None.
        emulated: the emulated cluster that it runs on, or None.
        nodes: node of every rank of the launch.
        batch: this rank's data.
        candidates: stock's dispatchers, alltoall first, then at least one of ours.
        skipped: by name, why chains were left out.
    """

    settings: Settings
    cluster: Cluster | None
    emulated: EmulatedCluster | None
    nodes: tuple[int, ...]
    batch: Batch
    candidates: Sequence[BenchCandidate] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The exchange as this rank sees it; nodes have their numbers in the launch."""
        ours = self.candidates[-1].dispatcher
        ranks = dist.get_process_group_ranks(ours.tp_ep_group)
        return replace(ours.setup.layout, nodes=tuple(self.nodes[rank] for rank in ranks))

    @property
    def ranks_per_node(self) -> int | None:
        """Consecutive ranks on each node of the launch; None where nodes are uneven."""
        number = self.nodes.count(self.nodes[0])
        is_even = consecutive_nodes(range(len(self.nodes)), number) == self.nodes
        return number if is_even else None


def with_candidates(bench: Bench) -> Bench:
    """Add stock's dispatchers, then ours, then ours with experts inside.

    Raises:
        ValueError: a chain that was asked for by name cannot run here.
    """
    settings = bench.settings
    candidates = [stock_candidate(bench, name) for name in settings.stock]
    skipped: dict[str, str] = {}
    for key in settings.pipelines:
        try:
            candidates.append(monta_candidate(bench, *key))
        except ValueError as error:
            if not settings.skip_incompatible:
                raise
            skipped[key[0]] = str(error)
    return replace(bench, candidates=candidates, skipped=skipped)


def stock_candidate(bench: Bench, name: str) -> BenchCandidate:
    """One of Megatron's dispatchers."""
    dispatcher = build_dispatcher(STOCK_DISPATCHERS[name], bench.settings)
    return BenchCandidate(kind="megatron", requested=name, dispatcher=dispatcher, batch=bench.batch)


def monta_candidate(
    bench: Bench, chain: str, num_chunks: int | None, overlaps: bool = False
) -> BenchCandidate:
    """Our dispatcher, with the benchmark's nodes and costs.

    Raises:
        ValueError: the chain cannot run here.
    """
    # Without costs nothing is predicted, and auto chooses by a guess.
    emulated = bench.emulated and default_costs(bench.emulated)
    dispatcher = build_dispatcher(
        MontaTokenDispatcher,
        bench.settings,
        chain=chain,
        num_chunks=num_chunks,
        ranks_per_node=bench.ranks_per_node,
        cluster=bench.cluster or emulated,
        tune_steps=bench.settings.tune_steps if chain == AUTO and not overlaps else 0,
        # The benchmark compares more, see `measure`.
        check=0,
        overlap_experts=overlaps or None,
    )
    return BenchCandidate(
        kind="monta", requested=chain, dispatcher=dispatcher, batch=bench.batch, overlaps=overlaps
    )


def run_candidate(
    candidate: BenchCandidate,
    experts: Experts,
    phase: program.Phase = "forward_backward",
    begin: Callable[[str], None] = lambda pass_name: None,
) -> dict[str, Any]:
    """Run the layer's exchange once: dispatch, experts, combine, and their backward passes.

    Args:
        candidate: that runs.
        experts: between dispatch and combine.
        phase: whether the backward passes run.
        begin: called with the name of each pass as it begins, unless the experts run inside the
            pipeline.

    Returns:
        Results at the experts and at the tokens, by name.
    """
    dispatcher, batch = candidate.dispatcher, candidate.batch
    hidden = batch.hidden.detach().requires_grad_()
    probs = batch.probs.detach().requires_grad_()
    results: dict[str, Any] = {}

    begin(program.DISPATCH.name)
    rows, row_probs = dispatcher.dispatch_preprocess(hidden, batch.routing_map, probs)
    rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
    if candidate.overlaps and dispatcher.computes:
        sums = dispatcher.compute(experts, rows, row_probs)
    else:
        rows, tokens_per_expert, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        results["rows at the experts"] = rows.detach()
        results["counts at the experts"] = torch.as_tensor(tokens_per_expert)
        results["probabilities at the experts"] = row_probs.detach()
        for tensor in (rows, row_probs):
            # Called as soon as its gradient is complete, before that of the dispatch begins.
            tensor.register_hook(lambda gradient: begin(program.DISPATCH_BACKWARD.name))
        outputs = experts(rows, tokens_per_expert, row_probs)
        if isinstance(experts, TimedExperts):
            outputs = experts.wait(outputs)
        begin(program.COMBINE.name)
        sums = dispatcher.combine_preprocess(outputs)
    output = dispatcher.combine_postprocess(dispatcher.token_combine(sums))

    if phase == "forward_backward":
        begin(program.COMBINE_BACKWARD.name)
        output.backward(batch.output_gradient)
    return results | {
        "outputs": output.detach(),
        "input gradients": hidden.grad,
        "gradients of the probabilities": probs.grad,
    }
