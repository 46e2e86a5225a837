"""The metadata of an exchange: what each rank counts, gathers once, and copies to the host once.

Notation: T = tokens of this rank, E = experts, B = token blocks, S = source ranks, L = local
experts, EP = expert parallel size, R = ranks per node.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from monta_megatron.chains import Chain, Layout, TokenCounts


@dataclass(frozen=True, kw_only=True)
class TokenCounting:
    """Counts tokens by block for one chain on one layout.

    Attributes:
        chain: decides which counts are taken at all.
        layout: this rank's place.
        num_blocks: B.
    """

    chain: Chain
    layout: Layout
    num_blocks: int

    def count(self, routing_map: torch.Tensor) -> torch.Tensor:
        """This rank's counts: [K] int64, on the device of the map, with no sync.

        Args:
            routing_map: [T, E] bool.
        """
        num_tokens, num_experts = routing_map.shape
        block = self._block_size(num_tokens)
        padded = torch.nn.functional.pad(
            routing_map, (0, 0, 0, self.num_blocks * block - num_tokens)
        )
        # [T, E] -> [B, T/B, E]
        blocks = padded.view(self.num_blocks, block, num_experts)
        widest = routing_map.sum(dim=1).amax(dim=0, keepdim=True) if num_tokens else None
        counts = [
            torch.full((1,), num_tokens, device=routing_map.device),
            torch.zeros(1, dtype=torch.long, device=routing_map.device)
            if widest is None
            else widest,
            blocks.sum(dim=1).flatten(),
        ]
        for num_parts in self._num_parts():
            # [B, T/B, E] -> [B, T/B, P, E/P] -> [B, P]: tokens with an expert in each part
            hits = blocks.unflatten(2, (num_parts, -1)).any(dim=3).sum(dim=1)
            counts.append(hits.flatten())
        return torch.cat(counts)

    def select(self, table: torch.Tensor) -> torch.Tensor:
        """The part of the gathered table [S, K] that this rank needs, as one tensor."""
        num_experts, first = self.layout.num_experts, self.layout.first_expert
        head, experts, *parts = table.split(self._widths(num_experts), dim=1)
        experts = experts.unflatten(1, (self.num_blocks, num_experts))
        selected = [head, experts[:, :, first : first + self.layout.num_local_experts]]
        for name, counts in zip(self._part_names(), parts, strict=True):
            by_part = counts.unflatten(1, (self.num_blocks, -1))
            selected += [by_part[self.layout.rank], by_part[:, :, self._here(name)]]
        return torch.cat([counts.flatten() for counts in selected])

    def tokens_per_expert(self, table: torch.Tensor) -> torch.Tensor:
        """[L] pairs for each local expert, from the gathered table, on its device."""
        num_experts, first = self.layout.num_experts, self.layout.first_expert
        _, experts, *_ = table.split(self._widths(num_experts), dim=1)
        by_expert = experts.unflatten(1, (self.num_blocks, num_experts)).sum(dim=(0, 1))
        return by_expert[first : first + self.layout.num_local_experts]

    def read(self, selected: NDArray[np.int64]) -> tuple[TokenCounts, int]:
        """What `select` left, on the host: the counts, and the longest list of any token."""
        num_sources, num_blocks = len(self.layout.nodes), self.num_blocks
        shapes = [(num_sources, 2), (num_sources, num_blocks, self.layout.num_local_experts)]
        for name, num_parts in zip(self._part_names(), self._num_parts(), strict=True):
            here = self._here(name)
            shapes += [(num_blocks, num_parts), (num_sources, num_blocks, here.stop - here.start)]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        head, experts, *parts = (
            counts.reshape(shape)
            for counts, shape in zip(np.split(selected, ends[:-1]), shapes, strict=True)
        )
        fields: dict[str, NDArray[np.int64]] = {}
        for name, sent, received in zip(self._part_names(), parts[::2], parts[1::2], strict=True):
            if name == "node":
                fields |= {"sent_to_nodes": sent, "for_node": received[:, :, 0]}
            elif "node" in self.chain.parts:
                fields |= {"for_node_ranks": received}
            else:
                fields |= {"sent_to_ranks": sent, "for_rank": received[:, :, 0]}
        tokens = np.stack([self._tokens_by_block(int(count)) for count in head[:, 0]])
        counts = TokenCounts(tokens=tokens, experts=experts, **fields)
        return counts, max(int(head[:, 1].max()), 1)

    def _block_size(self, num_tokens: int) -> int:
        return max(-(-num_tokens // self.num_blocks), 1)

    def _tokens_by_block(self, num_tokens: int) -> NDArray[np.int64]:
        block = self._block_size(num_tokens)
        return np.clip(num_tokens - np.arange(self.num_blocks) * block, 0, block)

    def _part_names(self) -> list[str]:
        return [part for part in self.chain.parts if part != "expert"]

    def _num_parts(self) -> list[int]:
        sizes = {"node": self.layout.num_nodes, "rank": self.layout.ep}
        return [sizes[name] for name in self._part_names()]

    def _here(self, name: str) -> slice:
        """The parts whose counts this rank needs of every source."""
        if name == "node":
            return slice(self.layout.node, self.layout.node + 1)
        if "node" in self.chain.parts:
            first = self.layout.node * self.layout.ranks_per_node
            return slice(first, first + self.layout.ranks_per_node)
        return slice(self.layout.rank, self.layout.rank + 1)

    def _widths(self, num_experts: int) -> list[int]:
        return [2, *(self.num_blocks * size for size in (num_experts, *self._num_parts()))]
