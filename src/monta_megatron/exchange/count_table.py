"""The metadata of an exchange: counted by each rank, gathered once, copied to the host once.

The expert ids of tokens are made here too, since how many there are follows from the metadata.

Notation: T = tokens of this rank, E = experts, B = token blocks, S = source ranks, L = local
experts, EP = expert parallel size, R = ranks per node, W = most experts of any token.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

from monta_megatron.chains import Chain, Counts, TokenCounts
from monta_megatron.chains.count_format import count_widths, part_sizes
from monta_megatron.chains.layout import Layout

T = TypeVar("T", int, NDArray[np.int64])


@dataclass(frozen=True, kw_only=True)
class ExchangeCounts:
    """What the count exchange brought to one rank, on the host.

    Attributes:
        permuted_tokens: counts for chains whose rows are permuted tokens.
        tokens: counts for chains whose rows are tokens; None if no candidate's are.
        num_tokens: [S] tokens of every rank.
        max_experts_per_token: of any token; 0 where rows are permuted tokens only.
        hashes: [S] each rank's hash of the rule by which it chooses; has to be equal on all.
    """

    permuted_tokens: Counts
    tokens: TokenCounts | None
    num_tokens: NDArray[np.int64]
    max_experts_per_token: int
    hashes: NDArray[np.int64]

    @property
    def max_tokens(self) -> int:
        """The most tokens on any rank."""
        return int(self.num_tokens.max())


@dataclass(frozen=True, kw_only=True)
class CountTable:
    """Counts what the candidate chains on one layout need, and no more.

    Attributes:
        chains: the candidates.
        layout: this rank's position; an expert counts once for each class.
        num_blocks: B, the number of token blocks; 1 if all chains' rows are permuted
            tokens.
        classes: of permuted tokens, see `TokenCounts`.
    """

    chains: tuple[Chain, ...]
    layout: Layout
    num_blocks: int
    classes: int = 1

    @cached_property
    def by_block(self) -> bool:
        """Whether any chain's rows are tokens, which are counted by block."""
        return any(chain.rows == "tokens" for chain in self.chains)

    def count(self, routing_map: torch.Tensor, agreement: int = 0) -> torch.Tensor:
        """This rank's counts: [K] int64, on the device of the map, with no sync.

        Args:
            routing_map: [T, E] bool.
            agreement: hash of what all ranks have to agree on.
        """
        num_tokens, num_experts = routing_map.shape
        device = routing_map.device
        experts_of_tokens = routing_map.sum(dim=1)
        # The maximum over zero tokens is undefined, so a 0 is appended.
        most_experts = torch.nn.functional.pad(experts_of_tokens, (0, 1)).amax(dim=0, keepdim=True)
        block = _block_size(num_tokens, self.num_blocks)
        padded = torch.nn.functional.pad(
            routing_map, (0, 0, 0, self.num_blocks * block - num_tokens)
        )
        # [T, E] -> [B, T/B, E]
        blocks = padded.view(self.num_blocks, block, num_experts)
        counts = [
            torch.full((1,), num_tokens, device=device),
            most_experts,
            torch.full((1,), agreement, device=device),
            blocks.sum(dim=1).flatten(),
        ]
        for num_parts in part_sizes(self.chains, self.layout).values():
            # [B, T/B, E] -> [B, T/B, P, E/P] -> [B, P]: tokens with an expert in each part
            hits = blocks.unflatten(2, (num_parts, -1)).any(dim=3).sum(dim=1)
            counts.append(hits.flatten())
        return torch.cat(counts)

    def select(self, table: torch.Tensor) -> torch.Tensor:
        """What this rank needs of all ranks' counts [S, K], as one tensor."""
        return torch.cat([section.flatten() for section in self._sections(table).values()])

    def read(self, selected: NDArray[np.int64]) -> ExchangeCounts:
        """Read on the host what `select` returned."""
        ends = np.cumsum([math.prod(shape) for shape in self._shapes.values()])
        pieces = zip(np.split(selected, ends[:-1]), self._shapes.items(), strict=True)
        sections = {name: piece.reshape(shape) for piece, (name, shape) in pieces}
        head, sent, experts = (sections.pop(name) for name in ("head", "sent", "experts"))
        layout = self.layout
        # [S, L] -> [EP, ETP, L] -> [ETP, EP, L]
        received = experts.sum(axis=1).reshape(layout.ep, layout.etp, -1).transpose(1, 0, 2)
        # [S] -> [S, B]: full blocks, then the remainder, then empty ones.
        num_tokens = head[:, :1]
        block = _block_size(num_tokens, self.num_blocks)
        tokens = np.clip(num_tokens - np.arange(self.num_blocks) * block, 0, block)
        return ExchangeCounts(
            permuted_tokens=Counts(sent=sent.sum(axis=0).reshape(layout.ep, -1), received=received),
            tokens=TokenCounts(tokens=tokens, experts=experts, classes=self.classes, **sections)
            if self.by_block
            else None,
            num_tokens=head[:, 0],
            max_experts_per_token=max(int(head[:, 1].max()), 1) if self.by_block else 0,
            hashes=head[:, 2],
        )

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what this rank needs, by name: those of an empty table."""
        widths = count_widths(self.chains, self.layout, self.num_blocks)
        table = torch.empty(len(self.layout.nodes), sum(widths), dtype=torch.int64)
        return {name: tuple(section.shape) for name, section in self._sections(table).items()}

    def _sections(self, table: torch.Tensor) -> dict[str, torch.Tensor]:
        """What this rank needs of all ranks' counts [S, K]; of parts, as `TokenCounts` says."""
        layout, first = self.layout, self.layout.first_expert
        widths = count_widths(self.chains, layout, self.num_blocks)
        head, experts, *parts = table.split(widths, dim=1)
        # [S, B, E]
        experts = experts.unflatten(1, (-1, layout.num_experts))
        sections = {
            "head": head,
            "sent": experts[layout.rank],
            "experts": experts[:, :, first : first + layout.num_local_experts],
        }
        names = part_sizes(self.chains, layout)
        for name, counts in zip(names, parts, strict=True):
            # [S, B, P]
            by_part = counts.unflatten(1, (self.num_blocks, -1))
            # Copies per rank are made at ETP 1 only, where a rank is an EP rank.
            here = layout.node if name == "node" else layout.rank
            sections |= {
                f"sent_to_{name}s": by_part[layout.rank],
                f"for_{name}": by_part[..., here],
            }
            if name == "rank" and "node" in names:
                on_node = by_part.unflatten(2, (layout.num_nodes, -1))
                sections["for_node_ranks"] = on_node[:, :, layout.node]
        return sections


def expert_ids_of(
    routing_map: torch.Tensor, probs: torch.Tensor, max_experts_per_token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts in ascending order, and their probabilities, with no sync.

    Args:
        routing_map: [T, E] bool; [T, E * classes] if there are several, see `TokenCounts`.
        probs: [T, E].
        max_experts_per_token: W, on any rank.

    Returns:
        Probabilities [T, W], padded with 0, and experts [T, W] int32, with one number per expert
        and class, padded with E * classes.
    """
    return _ExpertIds.apply(routing_map, probs, max_experts_per_token)


class _ExpertIds(torch.autograd.Function):
    """Keeps the map until backward, which is there anyway, and no indices [T, W]."""

    @staticmethod
    def forward(
        ctx: Any, routing_map: torch.Tensor, probs: torch.Tensor, max_experts_per_token: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_experts, classes = routing_map.shape[1], routing_map.shape[1] // probs.shape[1]
        descending = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=probs.device)
        scores = (routing_map * descending).topk(max_experts_per_token, dim=1).values
        ids = num_experts - scores
        experts = (ids // classes).clamp(max=probs.shape[1] - 1)
        ctx.save_for_backward(routing_map)
        ctx.classes = classes
        ctx.mark_non_differentiable(ids)
        return probs.gather(1, experts.long()).masked_fill_(scores == 0, 0), ids

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor, _: torch.Tensor
    ) -> tuple[None, torch.Tensor, None]:
        (routing_map,) = ctx.saved_tensors
        # [T, E * classes] the position of each expert among its token's
        positions = (routing_map.cumsum(dim=1) - 1).clamp_(min=0)
        by_class = gradient.gather(1, positions).masked_fill_(~routing_map, 0)
        if ctx.classes > 1:
            by_class = by_class.unflatten(1, (-1, ctx.classes)).sum(dim=2)
        return None, by_class, None


def _block_size(num_tokens: T, num_blocks: int) -> T:
    """Tokens in a full block."""
    return -(-num_tokens // num_blocks)
