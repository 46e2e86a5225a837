"""One micro-batch's exchange: what its four passes share."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from monta_megatron.chains.chain import BoundChain, Order, order_of_issue
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.copies import Indices
from monta_megatron.exchange.monitor import Monitor


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """One micro-batch's exchange, made before dispatch, kept for combine and both backward passes.

    Attributes:
        bound: the chain with this micro-batch's rows.
        groups: the process group for every group name of the chain.
        sum_dtype: dtype of the sums over copies of a row: fp32; for permuted tokens that of the
            probabilities if it is wider, in which Megatron reduces over ETP.
        monitor: counts bytes; tells its recorder, if it has one, what is issued.
        max_experts_per_token: W; 0 where rows are permuted tokens.
        order: the order of issue; see `lower`.
        fused: Triton kernels do the work; see `kernel_choice`.
        shared: by device, the indices that all passes share; made by the first one.
    """

    bound: BoundChain
    groups: Mapping[str, PeerGroup]
    sum_dtype: torch.dtype
    monitor: Monitor
    max_experts_per_token: int = 0
    order: Order = order_of_issue
    fused: bool = False
    shared: dict[torch.device, Indices] = field(default_factory=dict)

    def indices(self, device: torch.device) -> Indices:
        """Row indices and copies on a device."""
        if device not in self.shared:
            self.shared[device] = Indices(self.bound, device)
        return self.shared[device]
