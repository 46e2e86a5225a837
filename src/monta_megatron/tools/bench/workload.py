"""The data of a benchmark: the same for every candidate, and made from the seed alone.

Notation: T = tokens of a rank, H = hidden size, E = experts.
"""

from dataclasses import dataclass

import torch

from monta_megatron.chains.layout import Layout
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.bench.traffic import routing_maps


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


def make_batches(
    settings: Settings, layout: Layout, rank: int, device: torch.device
) -> tuple[Batch, ...]:
    """The batches of a rank of the launch: this one, or another whose tokens this one sends too.

    One for each exchange; they differ in nothing but where the tokens go.
    """
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + rank)
    dtype = getattr(torch, settings.dtype)

    def normal() -> torch.Tensor:
        rows = torch.randn(settings.tokens, 1, settings.hidden, generator=generator)
        return rows.to(device, dtype)

    shape = (settings.tokens, settings.num_experts)
    weights = torch.rand(shape, generator=generator).to(device)
    hidden, output_gradient = normal(), normal()
    batches = []
    for routing_map in routing_maps(settings, layout, rank):
        chosen = torch.tensor(routing_map, device=device)
        chosen_weights = weights * chosen
        batches.append(
            Batch(
                hidden=hidden,
                routing_map=chosen,
                probs=chosen_weights / chosen_weights.sum(dim=1, keepdim=True),
                output_gradient=output_gradient,
            )
        )
    return tuple(batches)
