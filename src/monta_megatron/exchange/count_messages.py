"""The counts of a micro-batch: the messages that carry them between ranks, and the counts read.

A rank counts its routing map, sends each rank a message (`chains.chain.message_columns` has its
columns), and copies what it has received to the host, once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from monta_megatron.chains import Chain, Counts, TokenCounts
from monta_megatron.chains.chain import (
    HEADER_SIZE,
    MOST_TOKENS,
    message_columns,
    num_parts,
)
from monta_megatron.core import Layout
from monta_megatron.exchange.kernels import is_fused

T = TypeVar("T", int, NDArray[np.int64])


def block_size(num_tokens: T, num_blocks: int) -> T:
    """Tokens of a full block: full blocks come first, then the remainder, then empty ones."""
    return -(-num_tokens // num_blocks)


# Ranks have the same numbers of tokens in most micro-batches.
@lru_cache(maxsize=128)
def tokens_by_block(num_tokens: tuple[int, ...], num_blocks: int) -> NDArray[np.int64]:
    """[S, B] tokens of every rank by token block; see `block_size`."""
    tokens_S1 = np.array(num_tokens)[:, None]
    firsts_SB1 = block_size(tokens_S1, num_blocks) * np.arange(num_blocks + 1)
    bounds_SB1 = np.minimum(firsts_SB1, tokens_S1)
    return bounds_SB1[:, 1:] - bounds_SB1[:, :-1]


def count_routing(
    routing_map_TE: torch.Tensor, num_blocks: int, num_parts: dict[str, int], with_most: bool
) -> dict[str, torch.Tensor]:
    """Count by token block: contiguous int32 tensors on the device of the map, with no sync.

    Args:
        routing_map_TE: bool.
        num_blocks: B.
        num_parts: P by name, for equal parts; each part consists of parts of the next kind.
        with_most: also return the most experts of any token.

    Returns:
        "experts": [B, E] tokens of each expert; for every name of parts, [B, P] tokens with an
        expert in each; "most experts": [1] of any token, 0 without tokens.
    """
    num_tokens = len(routing_map_TE)
    # The maximum of no tokens is undefined: pad blocks to one token without an expert.
    size = max(block_size(num_tokens, num_blocks), 1)
    if missing := num_blocks * size - num_tokens:
        routing_map_TE = torch.nn.functional.pad(routing_map_TE, (0, 0, 0, missing))
    # [T, E] -> [B, T/B, E]
    hits_BTE = routing_map_TE.view(num_blocks, size, -1)
    counts = {"experts": hits_BTE.sum(dim=1, dtype=torch.int32)}
    if with_most:
        counts["most experts"] = hits_BTE.sum(dim=2, dtype=torch.int32).amax().view(1)
    hits_BTP = hits_BTE
    for name, number in reversed(num_parts.items()):
        # [B, T/B, smaller parts] -> [B, T/B, P, parts of each] -> [B, T/B, P]
        hits_BTP = hits_BTP.unflatten(2, (number, -1)).any(dim=3)
        counts[name] = hits_BTP.sum(dim=1, dtype=torch.int32)
    return counts


@dataclass(frozen=True, kw_only=True)
class MicroBatchCounts:
    """Counts of one micro-batch that a rank needs, on the host.

    Attributes:
        count_permuted_tokens: computes `permuted_tokens` at the first use.
        tokens: counts for chains whose rows are tokens; None without such candidates.
        num_tokens: [S] tokens of every rank.
        max_experts_per_token: of any token; 0 where rows are permuted tokens only.
        received_rows: [S] rows received by each rank's experts in the layer's last exchange.
        tags: [S] 63 bits about each rank's choice; see `integration.auto`.
    """

    count_permuted_tokens: Callable[[], Counts]
    tokens: TokenCounts | None
    num_tokens: NDArray[np.int64]
    max_experts_per_token: int
    received_rows: NDArray[np.int64]
    tags: NDArray[np.int64]

    @cached_property
    def permuted_tokens(self) -> Counts:
        """Counts for chains whose rows are permuted tokens."""
        return self.count_permuted_tokens()

    @property
    def max_tokens(self) -> int:
        """The most tokens on any rank."""
        return int(self.num_tokens.max())


def busiest_over_mean(received_rows: NDArray[np.int64]) -> float | None:
    """Rows received by the busiest rank over the mean; None if no rank received any."""
    rows = received_rows
    return float(rows.max() / rows.mean()) if rows.any() else None


@dataclass(frozen=True, kw_only=True)
class CountMessages:
    """Writes and reads the messages of counts for the candidate chains; see `chains.chain`.

    Attributes:
        chains: the candidates.
        layout: this rank's position.
        num_blocks: B, the number of token blocks; 1 if all chains' rows are permuted
            tokens.
        kernels: "torch" or "fused"; see `exchange.kernels`.
    """

    chains: tuple[Chain, ...]
    layout: Layout
    num_blocks: int
    kernels: str = "torch"

    @cached_property
    def by_block(self) -> bool:
        """Whether any chain's rows are tokens, which are counted by block."""
        return any(chain.rows == "tokens" for chain in self.chains)

    @cached_property
    def num_parts(self) -> dict[str, int]:
        """Number of parts of each kind for which tokens are counted, by name."""
        return num_parts(self.chains, self.layout)

    @cached_property
    def num_counted(self) -> dict[str, int]:
        """Number of counted experts, and of parts of each kind, by name."""
        return {"experts": self.layout.num_experts, **self.num_parts}

    def count(
        self, routing_map_TE: torch.Tensor, tag: int = 0, received_rows: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count tokens on the device of the map, without a sync.

        Args:
            routing_map_TE: bool.
            tag: 63 bits for all ranks; see `integration.auto`.
            received_rows: rows received by this rank's experts in the last exchange.

        Returns:
            The message to each rank, [S, B, X] int32, and the tensor that `read` takes, [J] int32:
            room for the received messages, and behind it this rank's own header and counts.
        """
        num_tokens, device = len(routing_map_TE), routing_map_TE.device
        assert num_tokens <= MOST_TOKENS, f"{num_tokens} tokens: int32 cannot count them"
        count = count_routing
        if is_fused(self.kernels, device.type):
            from monta_megatron.exchange.kernels.routing import count_routing as count
        counts = count(routing_map_TE, self.num_blocks, self.num_parts, self.by_block)
        # The header, see `chains.chain`: 64 bits make two columns of int32, the low half first.
        counted, of_tag = (
            torch.full((1,), value, dtype=torch.int64, device=device).view(torch.int32)
            for value in (received_rows << 32 | num_tokens, tag)
        )
        # A placeholder where no chain's rows are tokens: nobody reads the column then.
        header = counted, counts.get("most experts", counted[:1]), of_tag
        if device not in self._sent:
            self._sent[device] = self._find_sent(device)
        sent_SBX = self._sent[device]
        joined_J = counted.new_empty(sent_SBX.numel() + self._num_own)
        own = joined_J[sent_SBX.numel() :]
        torch.cat([*header, *(counts[name].flatten() for name in self.num_counted)], out=own)
        return own.take(sent_SBX), joined_J

    @cached_property
    def _sent(self) -> dict[torch.device, torch.Tensor]:
        """[S, B, X] by device: where each integer of the messages lies in the header and counts."""
        return {}

    def _find_sent(self, device: torch.device) -> torch.Tensor:
        own, num_ranks = torch.arange(self._num_own, device=device), len(self.layout.nodes)
        _, own_places = self._sections
        sections = [own[own_places["header"]].expand(num_ranks, self.num_blocks, -1)]
        # All ranks of a node, or of an EP rank, get the same message.
        of_node = ("node", "rank") if "node" in self.num_parts else ()
        for name in self.num_counted:
            groups = self.layout.num_nodes if name in of_node else self.layout.ep
            # [B * groups * columns] -> [groups, B, columns] -> [S, B, columns]
            by_group = own[own_places[name]].view(self.num_blocks, groups, -1).transpose(0, 1)
            sections.append(by_group.repeat_interleave(num_ranks // groups, dim=0))
        return torch.cat(sections, dim=2)

    def read(self, joined_J: NDArray[np.int32]) -> MicroBatchCounts:
        """Read the received messages and this rank's own counts on the host; see `count`."""
        layout, num_ranks = self.layout, len(self.layout.nodes)
        received_SBX = joined_J[: -self._num_own].reshape(num_ranks, self.num_blocks, -1)
        # Sums over ranks may take more bits than the counts of one.
        # Blocks come first in memory, because a chain sums those of each chunk.
        by_block_BSX = np.ascontiguousarray(received_SBX.swapaxes(0, 1), dtype=np.int64)
        messages_SBX = by_block_BSX.swapaxes(0, 1)
        own = joined_J[-self._num_own :].astype(np.int64)
        # All blocks have the same header, whose last two columns are the tag.
        num_tokens_S, received_rows_S, most_experts_S = by_block_BSX[0, :, : HEADER_SIZE - 2].T
        tags_S = received_SBX[:, 0, HEADER_SIZE - 2 : HEADER_SIZE].copy().view(np.int64)[:, 0]

        def count_permuted_tokens() -> Counts:
            columns, own_places = self._sections
            # [S, L] -> [D, G, L] -> [G, D, L]
            pairs_SL = messages_SBX[:, :, columns["experts"]].sum(axis=1)
            sent_BE = own[own_places["experts"]].reshape(self.num_blocks, -1)
            return Counts(
                # [B, E] -> [E] -> [D, L]
                sent=sent_BE.sum(axis=0).reshape(layout.ep, -1),
                received=pairs_SL.reshape(layout.ep, layout.etp, -1).transpose(1, 0, 2),
            )

        return MicroBatchCounts(
            count_permuted_tokens=count_permuted_tokens,
            tokens=self._token_counts(num_tokens_S, messages_SBX, own) if self.by_block else None,
            num_tokens=num_tokens_S,
            max_experts_per_token=max(int(most_experts_S.max()), 1) if self.by_block else 0,
            received_rows=received_rows_S,
            tags=tags_S,
        )

    @cached_property
    def _sections(self) -> tuple[dict[str, slice], dict[str, slice]]:
        """Columns of each section in a message, and its place in this rank's header and counts."""
        lengths = {name: self.num_blocks * size for name, size in self.num_counted.items()}
        own_lengths = {"header": HEADER_SIZE, **lengths}
        return _slices(message_columns(self.chains, self.layout)), _slices(own_lengths)

    @cached_property
    def _num_own(self) -> int:
        """Integers of this rank's header and counts."""
        return HEADER_SIZE + self.num_blocks * sum(self.num_counted.values())

    def _token_counts(
        self, tokens_S: NDArray[np.int64], messages_SBX: NDArray[np.int64], own: NDArray[np.int64]
    ) -> TokenCounts:
        """Counts by block: tokens of each rank, all messages, and this rank's own counts."""
        columns, own_places = self._sections
        counts: dict[str, NDArray[np.int64]] = {
            name: messages_SBX[:, :, columns[name].start]
            for name in ("for_node", "for_rank")
            if name in columns
        }
        if "for_node_ranks" in columns:
            counts["for_node_ranks"] = to_each_SBP = messages_SBX[:, :, columns["for_node_ranks"]]
            counts["for_rank"] = to_each_SBP[:, :, self.layout.position]
        for part in self.num_parts:
            counts[f"sent_to_{part}s"] = own[own_places[part]].reshape(self.num_blocks, -1)
        return TokenCounts(
            tokens=tokens_by_block(tuple(tokens_S.tolist()), self.num_blocks),
            experts=messages_SBX[:, :, columns["experts"]],
            **counts,
        )


def _slices(widths: Mapping[str, int]) -> dict[str, slice]:
    """Slices of consecutive pieces of these widths, by name."""
    ends = accumulate(widths.values())
    return {
        name: slice(end - width, end)
        for (name, width), end in zip(widths.items(), ends, strict=True)
    }
