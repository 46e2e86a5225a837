"""The dispatchers to compare, and how one of them runs.

Notation: T = tokens of a rank, H = hidden size, E = experts, N = rows for the local experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from monta_megatron.common.flags import DTYPE_BYTES
from monta_megatron.common.nodes import consecutive_nodes
from monta_megatron.core import Layout
from monta_megatron.emulation.cluster import EmulatedCluster, default_costs
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.integration.dispatcher import MontaTokenDispatcher
from monta_megatron.integration.options import AUTO
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools.bench.layer import STOCK_DISPATCHERS, TimedExperts, build_dispatcher
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.bench.traffic import STOCK_TRAFFIC, routing_map


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
    weights = torch.rand(settings.tokens, settings.experts, generator=generator)
    hidden, output_gradient = (
        torch.randn(settings.tokens, 1, settings.hidden, generator=generator) for _ in range(2)
    )
    chosen = torch.tensor(routing_map(settings, rank))
    weights *= chosen
    dtype = getattr(torch, settings.dtype)
    return Batch(
        hidden=hidden.to(device, dtype),
        routing_map=chosen.to(device),
        probs=(weights / weights.sum(dim=1, keepdim=True)).to(device),
        output_gradient=output_gradient.to(device, dtype),
    )


@dataclass(frozen=True, kw_only=True)
class BenchCandidate:
    """One dispatcher, with the data that it runs on.

    Attributes:
        kind: whose dispatcher it is.
        requested: stock's dispatcher or our chain, as asked for; "auto" where the planner chooses.
        dispatcher: an object with Megatron's six phases.
        batch: its inputs.
        tokens_here: position of this rank's tokens in them.
        overlaps: whether the experts may run inside its pipeline.
        traffic: called with whether to include backward, gives the bytes between nodes and inside
            them that this rank's tokens cause; None where the dispatcher counts what it sends.
    """

    kind: Literal["megatron", "monta"]
    requested: str
    dispatcher: Any
    batch: Batch
    tokens_here: slice = slice(None)
    overlaps: bool = False
    traffic: Callable[[bool], tuple[int, int]] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The chain that runs and its number of chunks; for "auto", known only after a run."""
        if self.kind == "megatron":
            return self.requested, 1
        choice = self.dispatcher.choice
        return choice.chain, choice.num_chunks

    @property
    def experts_pipelined(self) -> bool:
        """Whether the experts run inside its pipeline; for "auto", known only after a run."""
        return self.overlaps and bool(self.dispatcher.choice.splits_experts)

    @property
    def is_auto(self) -> bool:
        """Whether the planner and trials choose."""
        return self.kind == "monta" and self.requested == AUTO

    def clear_sent_bytes(self) -> None:
        """Count from here on."""
        if self.traffic is None:
            self.dispatcher.monitor.bytes_sent.clear()

    def sent_bytes(self, backward: bool, num_runs: int) -> tuple[int, int]:
        """Payload of one of its runs between nodes and inside them, to be summed over ranks."""
        if self.traffic is not None:
            return self.traffic(backward)
        sent = self.dispatcher.monitor.bytes_by_resource()
        return sent["inter"] // num_runs, sent["intra"] // num_runs


@dataclass(frozen=True, kw_only=True)
class Bench:
    """An exchange, its data, and the dispatchers on them, as this rank sees them.

    Attributes:
        settings: of the benchmark.
        cluster: costs for predictions, or None.
        emulated: the emulated cluster that it runs on, or None.
        nodes: node of every rank of the launch.
        layout: of the exchange.
        batch: this rank's data.
        candidates: stock's dispatchers, alltoall first, then ours.
        skipped: by name, why chains were left out.
    """

    settings: Settings
    cluster: Cluster | None
    emulated: EmulatedCluster | None
    nodes: tuple[int, ...]
    layout: Layout
    batch: Batch
    candidates: Sequence[BenchCandidate] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def costs(self) -> Cluster | None:
        """The costs by which `auto` chooses: a guess where nothing is predicted for lack of any."""
        if self.cluster is None and self.emulated is not None:
            return default_costs(self.emulated)
        return self.cluster

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
    settings, map_TE = bench.settings, bench.batch.routing_map.cpu().numpy()
    value_bytes = DTYPE_BYTES[settings.dtype]
    return BenchCandidate(
        kind="megatron",
        requested=name,
        dispatcher=build_dispatcher(STOCK_DISPATCHERS[name], settings),
        batch=bench.batch,
        traffic=partial(STOCK_TRAFFIC[name], bench.layout, map_TE, settings.hidden, value_bytes),
    )


def monta_candidate(
    bench: Bench, chain: str, num_chunks: int | None, overlaps: bool = False
) -> BenchCandidate:
    """Our dispatcher, with the benchmark's nodes and costs.

    Raises:
        ValueError: the chain cannot run here.
    """
    dispatcher = build_dispatcher(
        MontaTokenDispatcher,
        bench.settings,
        chain=chain,
        num_chunks=num_chunks,
        ranks_per_node=bench.ranks_per_node,
        cluster=bench.costs,
        tune_steps=bench.settings.tune_steps if chain == AUTO and not overlaps else 0,
        # The benchmark compares more, see `measure`.
        check=0,
        overlap_experts=overlaps or None,
    )
    return BenchCandidate(
        kind="monta", requested=chain, dispatcher=dispatcher, batch=bench.batch, overlaps=overlaps
    )


def identity_experts(
    rows: torch.Tensor, tokens_per_expert: torch.Tensor, row_probs: torch.Tensor
) -> torch.Tensor:
    """No work between the two exchanges, so that the exchange alone is timed."""
    return rows


def run_candidate(candidate: BenchCandidate, experts: Experts, backward: bool) -> dict[str, Any]:
    """One pass of the layer's exchange: dispatch, experts, combine, and optionally backward.

    The gradient of the probabilities comes from the experts. `identity_experts` give none, so ones
    stand in for it, and the backward pass carries what it carries in training.

    Returns:
        Results at the experts and at the tokens, by name.
    """
    dispatcher, batch = candidate.dispatcher, candidate.batch
    hidden = batch.hidden.detach().requires_grad_()
    probs = batch.probs.detach().requires_grad_()
    results: dict[str, Any] = {}

    rows, row_probs = dispatcher.dispatch_preprocess(hidden, batch.routing_map, probs)
    rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
    if candidate.overlaps and dispatcher.computes:
        sums = dispatcher.compute(experts, rows, row_probs)
    else:
        rows, tokens_per_expert, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        results["rows at the experts"] = rows.detach()
        results["counts at the experts"] = torch.as_tensor(tokens_per_expert)
        results["probabilities at the experts"] = row_probs.detach()
        outputs = experts(rows, tokens_per_expert, row_probs)
        if isinstance(experts, TimedExperts):
            outputs = experts.wait(outputs)
        sums = dispatcher.combine_preprocess(outputs)
    output = dispatcher.combine_postprocess(dispatcher.token_combine(sums))

    if backward:
        roots, gradients = [output], [batch.output_gradient]
        if experts is identity_experts:
            roots.append(row_probs)
            gradients.append(torch.ones_like(row_probs))
        torch.autograd.backward(roots, gradients)
    return results | {
        "outputs": output.detach(),
        "input gradients": hidden.grad,
        "gradients of the probabilities": probs.grad,
    }
