"""The data of a benchmark: the same for every candidate, and made from the seed alone.

Notation: T = tokens of a rank, H = hidden size, E = experts.
"""

from dataclasses import dataclass

import torch

from monta_megatron.chains.layout import Layout
from monta_megatron.planner.named_routing import make_routing
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.bench.traffic import expert_nodes


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What goes into one rank's dispatcher.

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
    """The batch of a rank of the exchange: this one, or another whose tokens this one sends too."""
    routing_map = make_routing(
        settings.routing,
        settings.tokens,
        settings.topk,
        expert_nodes(layout),
        settings.seed,
        rank,
    )
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + rank)
    dtype = getattr(torch, settings.dtype)

    def normal() -> torch.Tensor:
        rows = torch.randn(settings.tokens, 1, settings.hidden, generator=generator)
        return rows.to(device, dtype)

    chosen = torch.from_numpy(routing_map).to(device)
    weights = torch.rand(routing_map.shape, generator=generator).to(device) * chosen
    return Batch(
        hidden=normal(),
        routing_map=chosen,
        probs=weights / weights.sum(dim=1, keepdim=True),
        output_gradient=normal(),
    )
