"""Where the counts of a micro-batch come from: all ranks say theirs, or experts are always filled.

Both sources give the counts in three steps: `gather` on the device (CUDA graphs may capture it),
`copy_to_host` where Megatron copies its own metadata, and `read` where the host needs them.

Notation: T = tokens of this rank, E = experts, K = integers that this rank needs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import get_capacity, maybe_move_tensor_to_cpu

from monta_megatron.chains import Counts
from monta_megatron.exchange.counting import Counting, GatheredCounts
from monta_megatron.exchange.state import ExchangeError
from monta_megatron.topology.layout import Layout


class CountExchange:
    """Counts of all ranks, from which every split follows."""

    def __init__(
        self, counting: Counting, config: Any, group: dist.ProcessGroup, chain_name: str
    ) -> None:
        """Prepare the exchange of counts of one layer.

        Args:
            counting: what is counted.
            config: the TransformerConfig.
            group: the ranks of the exchange.
            chain_name: for messages.
        """
        self.counting = counting
        self._config = config
        self._group = group
        self._chain_name = chain_name
        self._copy: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def gather(self, routing_map: torch.Tensor) -> tuple[torch.Tensor | None, int | None]:
        """Gather what this rank needs: [T, E] bool -> [K] int64 on its device, with no sync.

        Returns:
            The counts, and the number of this rank's pairs; None if only the counts tell it.
        """
        counts = self.counting.count(routing_map)
        with self._named():
            # [n] -> [EP*ETP, n]
            table = gather_from_sequence_parallel_region(counts, group=self._group)
        selected = self.counting.select(table.view(-1, len(counts)))
        is_dropless = self._config.moe_expert_capacity_factor is None
        if is_dropless and not self._config.moe_router_padding_for_quantization:
            return selected, len(routing_map) * self._config.moe_router_topk
        return selected, None

    def copy_to_host(self, counts: torch.Tensor | None, side_stream: torch.cuda.Stream) -> None:
        """Start to copy what `gather` returned: the only tensor that goes to the host."""
        if counts is None or not counts.is_cuda:
            self._copy = counts
            return
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            self._copy = maybe_move_tensor_to_cpu(counts, record_stream=True)
        self._copied = side_stream.record_event()

    def read(self) -> GatheredCounts:
        """Wait for the copy."""
        if self._copied is not None:
            with self._named():
                self._copied.synchronize()
        assert self._copy is not None, "the counts are not on their way to the host"
        return self.counting.read(self._copy.numpy())

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say what failed where a peer has died or stopped, as the executor does of its stages.

        Raises:
            ExchangeError: the collective failed or timed out.
        """
        try:
            yield
        except RuntimeError as error:
            ranks = dist.get_process_group_ranks(self._group)
            raise ExchangeError(
                f"dispatch: chain {self._chain_name}, exchange of counts, group tp_ep (rank "
                f"{self.counting.layout.rank} of {len(ranks)}: ranks "
                f"{', '.join(map(str, ranks))}) failed: {error}"
            ) from error


class CapacityCounts:
    """The counts where every expert takes `capacity` pairs from every rank: none are gathered."""

    def __init__(self, layout: Layout, config: Any) -> None:
        """Prepare the counts of one layer, by this rank's place and the TransformerConfig."""
        self._layout = layout
        self._config = config
        self._capacity = 0

    def gather(self, routing_map: torch.Tensor) -> tuple[torch.Tensor | None, int | None]:
        """Find the capacity, by [T, E]; returns None, and the number of this rank's pairs."""
        self._capacity = capacity_of(routing_map, self._config)
        return None, self._capacity * routing_map.shape[1]

    def copy_to_host(self, counts: torch.Tensor | None, side_stream: torch.cuda.Stream) -> None:
        """Do nothing: the capacity is on the host."""

    def read(self) -> GatheredCounts:
        """The same counts for every pair of ranks."""
        layout, config = self._layout, self._config
        received = np.full((layout.etp, layout.ep, layout.num_local_experts), self._capacity)
        # All ranks know the capacity; each rank's number of tokens is known only to itself.
        per_token = config.moe_router_topk * config.moe_expert_capacity_factor
        return GatheredCounts(
            pairs=Counts(sent=received[0], received=received),
            tokens=None,
            max_tokens=int(self._capacity * layout.num_experts / per_token),
            list_width=0,
            hashes=np.empty(0, dtype=np.int64),
        )


def capacity_of(routing_map: torch.Tensor, config: Any) -> int:
    """Pairs that each expert takes from this rank at most, by [T, E]."""
    num_tokens, num_experts = routing_map.shape
    capacity: int = get_capacity(
        num_tokens=num_tokens * config.moe_router_topk,
        num_experts=num_experts,
        capacity_factor=config.moe_expert_capacity_factor,
    )
    return capacity
