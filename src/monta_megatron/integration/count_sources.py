"""Counts of a micro-batch: received from all ranks, or known where experts get a fixed capacity.

An exchange of counts takes three steps: `collect` on the device (CUDA graphs may capture it),
`copy_to_host` where Megatron copies its own metadata, and the function that it returns where the
host needs the counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.moe.moe_utils import get_capacity, maybe_move_tensor_to_cpu
from megatron.core.transformer.transformer_config import TransformerConfig

from monta_megatron.chains import Counts
from monta_megatron.core import Layout
from monta_megatron.exchange.count_messages import CountMessages, MicroBatchCounts
from monta_megatron.exchange.errors import FEWER_MICRO_BATCHES, naming_failure

# Waits for the counts of a micro-batch, and reads them.
ReadCounts: TypeAlias = Callable[[], MicroBatchCounts]


@dataclass(kw_only=True)
class CountsFromRanks:
    """Counts received from all ranks of the group, from which all splits follow."""

    count_messages: CountMessages
    group: dist.ProcessGroup
    chain_name: str

    def collect(
        self, routing_map_TE: torch.Tensor, tag: int = 0, received_rows: int = 0
    ) -> torch.Tensor:
        """Send the counts to all ranks and receive theirs, with no sync.

        Args:
            routing_map_TE: [T, E] bool.
            tag, received_rows: see `CountMessages.count`.

        Returns:
            The counts [J] int32 on the map's device.
        """
        messages, counts_J = self.count_messages.count(routing_map_TE, tag, received_rows)
        received = counts_J[: messages.numel()].view_as(messages)
        with naming_failure(self._name, self.group, FEWER_MICRO_BATCHES):
            dist.all_to_all_single(received, messages, group=self.group)
        return counts_J

    def copy_to_host(self, counts_J: torch.Tensor, side_stream: torch.cuda.Stream) -> ReadCounts:
        """Start to copy the result of `collect` to the host; no other tensor is copied."""
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            copy = maybe_move_tensor_to_cpu(counts_J, record_stream=True)
        copied = side_stream.record_event()

        def read() -> MicroBatchCounts:
            with naming_failure(self._name, self.group, FEWER_MICRO_BATCHES):
                copied.synchronize()
            return self.count_messages.read(copy.numpy())

        return read

    @cached_property
    def _name(self) -> str:
        return f"exchange of counts: chain {self.chain_name}"


def capacity_of(routing_map_TE: torch.Tensor, config: TransformerConfig) -> int:
    """Rows that every expert gets from this rank where they are padded to capacity."""
    num_tokens, num_experts = routing_map_TE.shape
    capacity: int = get_capacity(
        num_tokens=num_tokens * config.moe_router_topk,
        num_experts=num_experts,
        capacity_factor=config.moe_expert_capacity_factor,
    )
    return capacity


def counts_of_capacity(
    capacity: int, layout: Layout, config: TransformerConfig
) -> MicroBatchCounts:
    """Counts of experts that get `capacity` rows from every rank."""
    received = np.full((layout.etp, layout.ep, layout.num_local_experts), capacity)
    # All ranks know the capacity, but no rank knows the others' numbers of tokens.
    per_token = config.moe_router_topk * config.moe_expert_capacity_factor
    num_tokens = int(capacity * layout.num_experts / per_token)
    return MicroBatchCounts(
        count_permuted_tokens=lambda: Counts(sent=received[0], received=received),
        tokens=None,
        num_tokens=np.full(len(layout.nodes), num_tokens),
        max_experts_per_token=0,
        received_rows=np.empty(0, dtype=np.int64),
        tags=np.empty(0, dtype=np.int64),
    )


def padded(routing_map_TE: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """The map [T, E] that is counted: padded where Megatron pads it."""
    if not config.moe_router_padding_for_quantization:
        return routing_map_TE
    is_fused = stock.is_experimental_enabled() and config.moe_permute_fusion
    pad = stock.fused_pad_routing_map if is_fused else stock.pad_routing_map
    result: torch.Tensor = pad(routing_map_TE, stock.get_align_size_for_quantization(config))
    return result


def replaces_preprocess() -> bool:
    """Whether a framework has replaced stock's `preprocess`.

    verl does (since its pull request 4986; utils/megatron/router_replay_patch.py), and others after
    it: a replayed token may name an expert twice, so a map holds fewer than top-k experts of it,
    and the rows that stock permutes have to be counted. A replacement keeps stock's name, but not
    the file in which it was written.
    """
    current = getattr(stock.MoEAlltoAllTokenDispatcher.preprocess, "__code__", None)
    original = stock.MoETokenDispatcher.__init__.__code__
    return current is None or current.co_filename != original.co_filename


# In batch-invariant mode (since 0.20) Megatron's unpermute adds a token's rows by EP rank, then by
# expert. It finds them by an inverse map, which permute returns on request.
KNOWS_ORDER = hasattr(moe_utils, "is_batch_invariant_mode_enabled")


def demands_order(config: TransformerConfig) -> bool:
    """Whether Megatron adds a token's rows in the order of its batch-invariant mode."""
    return bool(getattr(config, "batch_invariant_mode", False)) and KNOWS_ORDER
