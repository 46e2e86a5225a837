"""The dispatchers to compare, and how one of them runs.

Notation: T = tokens of a rank, H = hidden size, E = experts, N = rows for the local experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from monta_megatron.chains import CHAINS
from monta_megatron.common.flags import DTYPE_BYTES
from monta_megatron.core import Layout
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.integration.options import AUTO
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools.bench import traffic
from monta_megatron.tools.bench.layer import (
    TimedExperts,
    monta_dispatcher,
    stock_dispatcher,
)
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.bench.traffic import Traffic, routing_map


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


def make_batch(settings: Settings, layout: Layout, rank: int, device: torch.device) -> Batch:
    """The batch of a rank of the launch: this one, or another whose tokens this one sends too."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + rank)
    dtype = getattr(torch, settings.dtype)

    def normal() -> torch.Tensor:
        rows = torch.randn(settings.tokens, 1, settings.hidden, generator=generator)
        return rows.to(device, dtype)

    shape = (settings.tokens, settings.num_experts)
    weights = torch.rand(shape, generator=generator).to(device)
    hidden, output_gradient = normal(), normal()
    chosen = torch.tensor(routing_map(settings, layout, rank), device=device)
    chosen_weights = weights * chosen
    return Batch(
        hidden=hidden,
        routing_map=chosen,
        probs=chosen_weights / chosen_weights.sum(dim=1, keepdim=True),
        output_gradient=output_gradient,
    )


STOCK_TRAFFIC = {"alltoall": traffic.stock_alltoall, "allgather": traffic.stock_allgather}


@dataclass(frozen=True, kw_only=True)
class BenchCandidate:
    """One dispatcher, with the data that it runs on.

    Attributes:
        kind: whose dispatcher it is.
        requested: stock's dispatcher or our chain, as asked for; "auto" where the planner chooses.
        dispatcher: an object with Megatron's six phases.
        batch: its inputs.
        tokens_here: where this rank's tokens lie in them.
        overlaps: whether the experts may run inside its pipeline.
        traffic: called with whether to include backward, gives the bytes that this rank's tokens
            cause; None where the dispatcher counts what it sends.
    """

    kind: Literal["megatron", "monta"]
    requested: str
    dispatcher: Any
    batch: Batch
    tokens_here: slice = field(default_factory=lambda: slice(None))
    overlaps: bool = False
    traffic: Callable[[bool], Traffic] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The chain that runs and its number of chunks; for "auto", known only after a run."""
        if self.kind == "megatron":
            return self.requested, 1
        choice = self.dispatcher.choice
        return choice.chain, choice.num_chunks

    @property
    def name(self) -> str:
        """The name used in messages."""
        chain, num_chunks = self.key
        return f"{self.kind} {chain} x{num_chunks}{' with experts' * self.experts_pipelined}"

    @property
    def experts_pipelined(self) -> bool:
        """Whether the experts run inside its pipeline; for "auto", known only after a run."""
        return self.overlaps and bool(self.dispatcher.choice.splits_experts)

    @property
    def rows(self) -> Literal["permuted tokens", "tokens"]:
        """Kind of our chain's rows."""
        return CHAINS[self.dispatcher.choice.chain].rows

    @property
    def is_auto(self) -> bool:
        """Whether the planner and trials choose."""
        return self.kind == "monta" and self.requested == AUTO

    @property
    def is_baseline(self) -> bool:
        """Whether the others may be compared with this one; the first that is so is taken."""
        return self.kind == "megatron" and self.requested == "alltoall"


# The type of `build_candidates`.
Build: TypeAlias = Callable[
    [Settings, Cluster | None, Layout, Batch], tuple[list[BenchCandidate], dict[str, str]]
]


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Outputs of the dispatcher at both ends.

    Attributes:
        expert_rows: [N, H]; here and in the next two, something else where experts overlap.
        tokens_per_expert: rows of each local expert.
        row_probs: [N].
        output: [T, 1, H].
        input_gradient: [T, 1, H], or None without backward.
        probs_gradient: [T, E], likewise.
    """

    expert_rows: torch.Tensor
    tokens_per_expert: torch.Tensor
    row_probs: torch.Tensor
    output: torch.Tensor
    input_gradient: torch.Tensor | None
    probs_gradient: torch.Tensor | None


def stock_candidate(settings: Settings, layout: Layout, batch: Batch, name: str) -> BenchCandidate:
    """One of Megatron's dispatchers."""

    def traffic_of(backward: bool) -> Traffic:
        routing_map = batch.routing_map.cpu().numpy()
        dtype_bytes = DTYPE_BYTES[settings.dtype]
        return STOCK_TRAFFIC[name](layout, routing_map, settings.hidden, dtype_bytes, backward)

    return BenchCandidate(
        kind="megatron",
        requested=name,
        dispatcher=stock_dispatcher(settings, name),
        batch=batch,
        traffic=traffic_of,
    )


def build_candidates(
    settings: Settings, cluster: Cluster | None, layout: Layout, batch: Batch
) -> tuple[list[BenchCandidate], dict[str, str]]:
    """Stock's dispatchers, then ours, chain by chain.

    Returns:
        The candidates, and by name why a chain was left out, if chains were not asked for by name.

    Raises:
        ValueError: a chain that was asked for by name cannot run here.
    """
    candidates = [stock_candidate(settings, layout, batch, name) for name in settings.stock]
    left_out: dict[str, str] = {}
    for name in settings.chains:
        for num_chunks in _numbers_of_chunks(name, settings):
            try:
                dispatcher = build_dispatcher(settings, cluster, name, num_chunks)
            except ValueError as error:
                if not settings.skip_incompatible:
                    raise
                left_out[name] = str(error)
                break
            candidates.append(
                BenchCandidate(kind="monta", requested=name, dispatcher=dispatcher, batch=batch)
            )
    candidates += [
        BenchCandidate(
            kind="monta",
            requested=name,
            dispatcher=build_dispatcher(settings, cluster, name, num_chunks, overlap_experts=True),
            batch=batch,
            overlaps=True,
        )
        for name, num_chunks in settings.overlap_keys
        if name not in left_out
    ]
    return candidates, left_out


def build_dispatcher(
    settings: Settings, cluster: Cluster | None, chain: str, num_chunks: int | None, **options: Any
) -> Any:
    """Our dispatcher, with the benchmark's nodes and costs, and more options.

    Raises:
        ValueError: the chain cannot run here.
    """
    return monta_dispatcher(
        settings,
        chain=chain,
        num_chunks=num_chunks,
        ranks_per_node=settings.ranks_per_node,
        cluster=cluster,
        tune_steps=settings.tune_steps if chain == AUTO and not options else 0,
        # The benchmark compares more, see `measure`.
        check=0,
        **options,
    )


def _numbers_of_chunks(chain: str, settings: Settings) -> tuple[int | None, ...]:
    """The numbers of chunks to run a chain with; None where the planner chooses."""
    if chain == AUTO:
        return (None,)
    return (1,) if CHAINS[chain].serial else settings.num_chunks


def identity_experts(
    rows: torch.Tensor, tokens_per_expert: torch.Tensor, row_probs: torch.Tensor
) -> torch.Tensor:
    """No work between the two exchanges, so that the exchange alone is timed."""
    return rows


def run_candidate(candidate: BenchCandidate, experts: Experts, backward: bool) -> Passed:
    """One pass of the layer's exchange: dispatch, experts, combine, and optionally backward.

    The gradient of the probabilities comes from the experts. `identity_experts` give none, so ones
    stand in for it, and the backward pass carries what it carries in training.
    """
    dispatcher, batch = candidate.dispatcher, candidate.batch
    hidden = batch.hidden.detach().requires_grad_()
    probs = batch.probs.detach().requires_grad_()

    rows, row_probs = dispatcher.dispatch_preprocess(hidden, batch.routing_map, probs)
    rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
    tokens_per_expert = torch.empty(0)
    if candidate.overlaps and dispatcher.computes:
        sums = dispatcher.compute(experts, rows, row_probs)
    else:
        rows, tokens_per_expert, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
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
    return Passed(
        expert_rows=rows.detach(),
        tokens_per_expert=torch.as_tensor(tokens_per_expert),
        row_probs=row_probs.detach(),
        output=output.detach(),
        input_gradient=hidden.grad,
        probs_gradient=probs.grad,
    )


def traffic_of_run(candidate: BenchCandidate, backward: bool, num_runs: int) -> Traffic:
    """Payload per run that this rank's tokens cause, or that it sends: the sums over ranks agree.

    Args:
        candidate: that ran.
        backward: whether its runs had a backward pass.
        num_runs: its runs since its monitor was cleared.
    """
    if candidate.traffic is not None:
        return candidate.traffic(backward)
    sent = candidate.dispatcher.monitor.bytes_by_resource()
    return Traffic(inter_bytes=sent["inter"] // num_runs, intra_bytes=sent["intra"] // num_runs)
