"""The token dispatcher: Megatron's six phases with a chain in the two that communicate.

    phase                  stock alltoall             here
    dispatch_preprocess    counts, permute            the same, counts kept for the chain
    token_dispatch         A2A(EP)                    the chain: A2A(EP) | AG(ETP) | Place ...
    dispatch_postprocess   AG(ETP), sort by expert    counts alone
    combine_preprocess     unsort, RS(ETP)            nothing
    token_combine          A2A(EP)                    the chain's transpose
    combine_postprocess    unpermute                  the same

A chain whose rows are tokens copies them itself, so it has no use for permute and unpermute.

Notation: H = hidden size, T = tokens of this rank, E = number of experts, L = local experts,
EP and ETP = sizes of the expert parallel and expert tensor parallel groups, N = rows.
"""

import logging
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.moe.moe_utils import get_capacity, maybe_move_tensor_to_cpu
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from monta_megatron.chains import CHAINS, Counts, Layout
from monta_megatron.exchange.autograd import combine, dispatch
from monta_megatron.exchange.counting import TokenCounting
from monta_megatron.exchange.groups import find_nodes, peer_groups
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.walk import Exchange
from monta_megatron.integration.duties import check_duties
from monta_megatron.options import Options

logger = logging.getLogger(__name__)

# Since 0.18 overlapped shared experts wait for the caller in both communication phases, and their
# second layer runs in token_combine; before that, combine_postprocess runs it.
SHARED_EXPERTS_WAIT = hasattr(SharedExpertMLP, "wait_current_stream")

_logged: set[str] = set()


class MontaTokenDispatcher(stock.MoEAlltoAllTokenDispatcher):
    """Runs the exchange of an MoE layer as a pipelined chain, forward and backward.

    Attributes:
        options: what the configuration asked for, checked.
        chain: the chain that runs.
        layout: this rank's place in the exchange.
        groups: the process groups behind the chain's group names.
        monitor: bytes by tier, and the record of starts and waits where one is kept.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any = None,
    ) -> None:
        """Build the dispatcher for one MoE layer.

        Raises:
            ValueError: an option is out of range, the chain cannot run on this layout, or the
                configuration asks for something that this dispatcher refuses; the message names
                the field.
        """
        check_duties(config)
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        self.options = Options.of(config)
        self.chain = CHAINS[self.options.chain]
        self.layout = self._find_layout()
        reason = self.chain.refusal(self.layout)
        if reason is not None:
            raise ValueError(f"moe_monta_chain: {self.chain.name} cannot run here: {reason}")
        self.groups = peer_groups(
            self.chain,
            self.layout,
            {"ep": self.ep_group, "etp": self.tp_group, "tp_ep": self.tp_ep_group},
        )
        self.monitor = Monitor()
        self._token_counting = TokenCounting(
            chain=self.chain, layout=self.layout, num_blocks=self.options.num_chunks
        )
        # The counts behind every split, as one tensor: the only thing that goes to the host. CUDA
        # graphs replay it by name.
        self.exchange_counts: torch.Tensor | None = None
        # Megatron reads every listed attribute, so what we never make may not be listed.
        self.cudagraph_attrs.remove("num_global_tokens_per_local_expert")
        self.cudagraph_attrs.append("exchange_counts")
        self._counts_on_host: torch.Tensor | None = None
        self._counts_event: torch.cuda.Event | None = None
        self._exchange: Exchange | None = None
        _log_once(
            f"monta: chain {self.chain.name}, {self.options.num_chunks} chunks, EP {self.ep_size} "
            f"x ETP {self.tp_size} over {self.layout.num_nodes} node(s)"
        )

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Gather the counts from which every split follows; nothing goes to the host yet.

        Args:
            routing_map: [T, E] bool.

        Returns:
            [L] rows for each local expert.
        """
        if self.chain.rows == "tokens":
            return self._count_tokens(routing_map)
        if self.drop_and_pad:
            # Every expert takes `capacity` rows from every rank, so no rank has to ask.
            return super().preprocess(routing_map)

        # [E]
        sent = routing_map.sum(dim=0).long()
        if (
            self.config.moe_expert_capacity_factor is not None
            or self.config.moe_router_padding_for_quantization
        ):
            # How many rows there are is known on the device only, and permute needs the number.
            self.num_out_tokens = None
            self._maybe_update_cuda_sync_point("before_permutation_1")
        else:
            self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk

        # [EP*ETP, E] -> [ETP, EP, L]
        first = self.local_expert_indices[0]
        received = (
            self._gather(sent)
            .view(self.ep_size, self.tp_size, self.num_experts)
            .transpose(0, 1)[:, :, first : first + self.num_local_experts]
        )
        self.exchange_counts = torch.cat([sent, received.reshape(-1)])
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
        return received.sum(dim=(0, 1))

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count, and permute where rows are pairs.

        Args:
            hidden_states: [S/TP, B, H].
            routing_map: [T, E] bool.
            probs: [T, E].

        Returns:
            [N, H] pairs in expert order and their probabilities [N]; or the tokens [T, H] and
            all probabilities [T, E].
        """
        if self.chain.rows == "pairs":
            return super().dispatch_preprocess(hidden_states, routing_map, probs)
        self.hidden_shape = hidden_states.shape
        self.probs = probs
        self.routing_map = routing_map
        # [S/TP, B, H] -> [T, H]
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        if self.config.moe_router_padding_for_quantization:
            multiple = stock.get_align_size_for_quantization(self.config)
            self.routing_map = stock.pad_routing_map(self.routing_map, multiple)
        if self.drop_and_pad:
            self.routing_map = self._padded_to_capacity(self.routing_map)
        self.tokens_per_expert: torch.Tensor | None = self.preprocess(self.routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self._maybe_dtoh_and_synchronize("before_permutation_1")
        return tokens, probs

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move rows and probabilities to their experts.

        Args:
            permutated_local_input_tokens: what dispatch_preprocess returned.
            permuted_probs: likewise.

        Returns:
            [rows for the local experts, H] and their probabilities, in the order (local expert,
            ETP rank, EP rank, token).
        """
        if self.shared_experts is not None and SHARED_EXPERTS_WAIT:
            self.shared_experts.wait_current_stream()
        self._maybe_dtoh_and_synchronize("before_ep_alltoall")
        if self.chain.rows == "pairs":
            self._exchange = self._bind(self._pair_counts())
            probs, ids = permuted_probs, None
        else:
            counts, width = self._token_counting.read(self._host_counts())
            self._exchange = self._bind(counts, width)
            probs, ids = self._lists(permuted_probs, width)
        rows, row_probs = dispatch(self._exchange, permutated_local_input_tokens, probs, ids)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        return rows, row_probs

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add the experts' counts: [L] int64 on the host. The rows are in expert order already."""
        assert self._exchange is not None
        self.tokens_per_expert = None
        tokens_per_expert = torch.from_numpy(self._exchange.bound.rows_per_local_expert)
        return global_input_tokens, tokens_per_expert, global_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing: the transpose begins with the order in which the experts leave their rows."""
        return hidden_states

    def token_combine(
        self,
        hidden_states: torch.Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> torch.Tensor:
        """Bring the experts' rows back: [rows of the local experts, H] -> [N, H] or [T, H].

        The two flags belong to other dispatchers; stock alltoall ignores them too.
        """
        if self.shared_experts is not None and SHARED_EXPERTS_WAIT:
            self.shared_experts.wait_current_stream()
        assert self._exchange is not None
        rows = combine(self._exchange, hidden_states)
        self._exchange = None
        if self.shared_experts is not None and SHARED_EXPERTS_WAIT:
            self._finish_shared_experts(rows)
        return rows

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Unpermute where rows are pairs: [N, H] -> [S/TP, B, H]; tokens are summed already."""
        if self.chain.rows == "pairs":
            return super().combine_postprocess(permutated_local_input_tokens)
        output = permutated_local_input_tokens.view(self.hidden_shape)
        if self.shared_experts is not None:
            if not SHARED_EXPERTS_WAIT:
                self._finish_shared_experts(permutated_local_input_tokens)
            output = output + self.shared_experts.get_output()
        return output

    def _find_layout(self) -> Layout:
        classes = 2 if self.drop_and_pad and self.chain.rows == "tokens" else 1
        return Layout(
            ep=self.ep_size,
            etp=self.tp_size,
            num_local_experts=self.num_local_experts * classes,
            rank=dist.get_group_rank(self.tp_ep_group, dist.get_rank()),
            nodes=find_nodes(self.tp_ep_group, self.options.ranks_per_node),
            classes=classes,
        )

    def _gather(self, counts: torch.Tensor) -> torch.Tensor:
        """Every rank's counts: [K] -> [EP*ETP, K]."""
        if self.ep_size > 1 or self.tp_size > 1:
            gathered = gather_from_sequence_parallel_region(counts, group=self.tp_ep_group)
            return gathered.view(-1, counts.shape[0])
        return counts[None]

    def _count_tokens(self, routing_map: torch.Tensor) -> torch.Tensor:
        table = self._gather(self._token_counting.count(routing_map))
        self.exchange_counts = self._token_counting.select(table)
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
        per_class = self._token_counting.tokens_per_expert(table)
        return per_class.view(self.num_local_experts, -1).sum(dim=1)

    def _padded_to_capacity(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Which tokens fill each expert to its capacity: [T, E] -> [T, 2E].

        As stock's permute chooses them: an expert's routed tokens first, then tokens that were
        not routed to it, each kind in order. The two kinds are two classes of pairs.
        """
        num_tokens, num_experts = routing_map.shape
        self.capacity = get_capacity(
            num_tokens=num_tokens * self.config.moe_router_topk,
            num_experts=num_experts,
            capacity_factor=self.moe_expert_capacity_factor,
        )
        # [T, E] -> [E, T] -> [E, capacity]
        by_expert = routing_map.to(torch.int8).T.contiguous()
        chosen = by_expert.argsort(dim=1, descending=True, stable=True)[:, : self.capacity]
        is_padding = 1 - by_expert.gather(1, chosen).long()
        # [E, capacity] -> [E, 2, T] -> [T, 2E]
        pairs = routing_map.new_zeros(num_experts, 2 * num_tokens)
        pairs.scatter_(1, is_padding * num_tokens + chosen, True)
        return pairs.view(2 * num_experts, num_tokens).T.contiguous()

    def _lists(self, probs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's experts in ascending order, and their probabilities.

        Args:
            probs: [T, E].
            width: W, the longest list of any rank.

        Returns:
            probabilities [T, W], 0 beyond the end of a list, and experts [T, W] int32, numbered
            by class, filled up with their number.
        """
        num_experts = self.layout.num_experts
        descending = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=probs.device)
        scores = (self.routing_map * descending).topk(width, dim=1).values
        ids = num_experts - scores
        experts = (ids // self.layout.classes).clamp(max=self.num_experts - 1)
        return probs.gather(1, experts.long()) * (scores > 0), ids

    def _bind(self, counts: Any, list_width: int = 0) -> Exchange:
        return Exchange(
            bound=self.chain.bind(self.layout, counts, self.options.num_chunks),
            groups=self.groups,
            sum_dtype=torch.promote_types(self.probs.dtype, torch.float32),
            monitor=self.monitor,
            list_width=list_width,
            num_experts=self.layout.num_experts,
        )

    def _finish_shared_experts(self, rows: torch.Tensor) -> None:
        self.shared_experts.linear_fc2_forward(rows)
        self.shared_experts.post_forward_comm()

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Copy the counts to the host at the copy's point and wait for them at the sync's point.

        Stock's phases call this with the points they pass; ours needs one tensor on the host.
        """
        if self.drop_and_pad and self.chain.rows == "pairs":
            return tokens_per_expert
        if point == self.cuda_dtoh_point:
            self._copy_counts_to_host()
        if point == self.cuda_sync_point:
            if self._counts_event is not None:
                self._counts_event.synchronize()
            if self.chain.rows == "pairs" and self.num_out_tokens is None:
                self.num_out_tokens = int(self._pair_counts().sent.sum())
        return tokens_per_expert

    def _copy_counts_to_host(self) -> None:
        assert self.exchange_counts is not None
        if not self.exchange_counts.is_cuda:
            self._counts_on_host = self.exchange_counts
            return
        side_stream = self.cuda_dtoh_stream
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            self._counts_on_host = maybe_move_tensor_to_cpu(
                self.exchange_counts, record_stream=True
            )
        self._counts_event = side_stream.record_event()

    def _host_counts(self) -> Any:
        assert self._counts_on_host is not None
        return self._counts_on_host.numpy()

    def _pair_counts(self) -> Counts:
        """The counts of this micro-batch's pairs, on the host."""
        sent_shape = (self.ep_size, self.num_local_experts)
        received_shape = (self.tp_size, self.ep_size, self.num_local_experts)
        if self.drop_and_pad:
            return Counts(
                sent=np.full(sent_shape, self.capacity),
                received=np.full(received_shape, self.capacity),
            )
        counts = self._host_counts()
        return Counts(
            sent=counts[: self.num_experts].reshape(sent_shape),
            received=counts[self.num_experts :].reshape(received_shape),
        )


def _log_once(message: str) -> None:
    """Say what was chosen: once per process and message, on rank 0."""
    if dist.get_rank() == 0 and message not in _logged:
        _logged.add(message)
        # Megatron logs at WARNING unless asked otherwise; what it tells its users it prints.
        print(message, flush=True)
        logger.info(message)
