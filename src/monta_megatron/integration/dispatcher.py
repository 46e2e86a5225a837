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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.moe.moe_utils import get_capacity, maybe_move_tensor_to_cpu
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from monta_megatron.chains import Counts
from monta_megatron.chains.gathered import counted_blocks
from monta_megatron.exchange.autograd import combine, dispatch
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.counting import Counting, GatheredCounts, lists_of
from monta_megatron.exchange.groups import peer_groups
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.state import Exchange, ExchangeError
from monta_megatron.integration.agreement import agree, on_every_exchange
from monta_megatron.integration.choice import choose_alike, rule_of
from monta_megatron.integration.duties import check_duties
from monta_megatron.integration.nodes import nodes_of_exchange
from monta_megatron.options import AUTO, Options
from monta_megatron.planner.choice import Choice, Decision
from monta_megatron.quantities import counted
from monta_megatron.texts import shown
from monta_megatron.topology.layout import Layout

# Since 0.18, overlapped shared experts wait for the caller's stream in both communication phases,
# and run their second layer in token_combine; earlier releases run it in combine_postprocess.
SHARED_EXPERTS_WAIT = hasattr(SharedExpertMLP, "wait_current_stream")

_reported: set[str] = set()


class MontaTokenDispatcher(stock.MoEAlltoAllTokenDispatcher):
    """Runs the exchange of an MoE layer as a pipelined chain, forward and backward.

    Attributes:
        options: what the configuration asked for, checked.
        choice: how the chain is chosen for every micro-batch.
        chain: the chain of the micro-batch under way.
        num_chunks: its number of chunks.
        layout: this rank's place in the exchange.
        groups: the process group for each group name of the chains.
        monitor: bytes by tier; starts and waits go to its recorder, if it has one.
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
        self._reports = reports_for_stage(self.tp_ep_group, pg_collection)
        self.layout, self.choice, agreement = on_every_exchange(
            self._set_up, getattr(pg_collection, "expt_dp", None)
        )
        self.groups = peer_groups(
            self.choice.chains,
            self.layout,
            {"ep": self.ep_group, "etp": self.tp_group, "tp_ep": self.tp_ep_group},
            self.options.max_ctas,
        )
        _share_time_limit(self.groups)
        self.monitor = Monitor()
        rows = {chain.rows for chain in self.choice.chains}
        # Routed pairs and padding, see `_padded_to_capacity`.
        classes = 2 if self.drop_and_pad and "tokens" in rows else 1
        self._counting = Counting(
            chains=self.choice.chains,
            layout=replace(self.layout, num_local_experts=classes * self.num_local_experts),
            num_blocks=counted_blocks(self.choice.chains, self.choice.num_blocks),
            agreement=agreement,
            classes=classes,
        )
        # Whether only the counts, once on the host, decide if tokens or pairs are sent.
        self._is_open = len(rows) > 1
        # The counts from which every split follows, as one tensor: all that is copied to the host.
        # CUDA graphs replay it by name.
        self.exchange_counts: torch.Tensor | None = None
        # Megatron reads every listed attribute, so one that we never set must not be listed.
        self.cudagraph_attrs.remove("num_global_tokens_per_local_expert")
        self.cudagraph_attrs.append("exchange_counts")
        self._counts_on_host: torch.Tensor | None = None
        self._counts_event: torch.cuda.Event | None = None
        self._counts: GatheredCounts | None = None
        self._exchange: Exchange | None = None
        self._decision: Decision | None = None
        # Until the first micro-batch's counts are known, the choice is that for one token.
        self._decide(max_tokens=1, log=len(self.choice.chains) == 1)

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Gather the counts from which every split follows; nothing goes to the host yet.

        Args:
            routing_map: [T, E] bool.

        Returns:
            [L] rows for each local expert.
        """
        if self._needs_no_gather:
            return super().preprocess(routing_map)
        self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
        if (
            self.config.moe_expert_capacity_factor is not None
            or self.config.moe_router_padding_for_quantization
        ):
            # The number of rows is known on the device only, and permute needs it.
            self.num_out_tokens = None
            if not self._counting.by_block:
                self._maybe_update_cuda_sync_point("before_permutation_1")
        if self._is_open:
            self._maybe_update_cuda_sync_point("before_permutation_1")
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
        # [EP*ETP, K]
        table = self._gather(self._counting.count(routing_map))
        self.exchange_counts = self._counting.select(table)
        per_class = self._counting.tokens_per_expert(table)
        return per_class.view(self.num_local_experts, -1).sum(dim=1)

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count, and permute where rows are pairs.

        If the counts decide what a row is, they are waited for here, else in token_dispatch.

        Args:
            hidden_states: [S/TP, B, H].
            routing_map: [T, E] bool.
            probs: [T, E].

        Returns:
            [N, H] pairs in expert order and their probabilities [N]; or the tokens [T, H] and
            all probabilities [T, E].
        """
        if not self._counting.by_block:
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
        if self._is_open:
            self._decide_by_counts()
            if self.chain.rows == "pairs":
                return self._permute(tokens, probs)
        if self.config.overlap_moe_expert_parallel_comm:
            # The 1F1B schedule frees what goes into token_dispatch, but the router has saved these.
            return tokens.clone(), probs.clone()
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
        if not self._is_open:
            self._decide_by_counts()
        if self.chain.rows == "pairs":
            self._exchange = self._bind(self._pair_counts())
            probs, ids = permuted_probs, None
        else:
            assert self._counts is not None and self._counts.tokens is not None
            width = self._counts.list_width
            self._exchange = self._bind(self._counts.tokens, width)
            probs, ids = lists_of(self.routing_map, permuted_probs, width)
        self._counts = None
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
        """Do nothing: the transpose takes the rows in the order in which the experts leave them."""
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

    def _set_up(self) -> tuple[Layout, Choice, int]:
        """Layout, choice and agreement of this exchange; raises on all of its ranks, or on none."""
        layout = self._find_layout()
        # If capacity fixes the counts, nothing is gathered; if CUDA graphs capture the permutation,
        # there has to be one. In both cases "auto" may choose only chains of pairs.
        pairs_only = self.drop_and_pad or self.cuda_dtoh_point != "before_permutation_1"
        choice, agreement = choose_alike(
            self.options, self.config, layout, pairs_only, self.tp_ep_group
        )
        return layout, choice, agreement

    def _find_layout(self) -> Layout:
        nodes, note = nodes_of_exchange(self.options, self.tp_ep_group)
        if note is not None:
            self._report(note)
        return Layout(
            ep=self.ep_size,
            etp=self.tp_size,
            num_local_experts=self.num_local_experts,
            rank=dist.get_group_rank(self.tp_ep_group, dist.get_rank()),
            nodes=nodes,
        )

    def _gather(self, counts: torch.Tensor) -> torch.Tensor:
        """Every rank's counts: [K] -> [EP*ETP, K]."""
        if self.ep_size > 1 or self.tp_size > 1:
            with self._naming_the_exchange_of_counts():
                gathered = gather_from_sequence_parallel_region(counts, group=self.tp_ep_group)
            return gathered.view(-1, counts.shape[0])
        return counts[None]

    @contextmanager
    def _naming_the_exchange_of_counts(self) -> Iterator[None]:
        """Say what failed where a peer has died or stopped, as the executor does of its stages.

        Raises:
            ExchangeError: the collective failed or timed out.
        """
        try:
            yield
        except RuntimeError as error:
            chain = self.chain.name if len(self.choice.chains) == 1 else AUTO
            peers = dist.get_process_group_ranks(self.tp_ep_group)
            raise ExchangeError(
                f"dispatch: chain {chain}, exchange of counts, group tp_ep (rank "
                f"{self.layout.rank} of {len(peers)}: ranks {', '.join(map(str, peers))}) failed: "
                f"{error}"
            ) from error

    @property
    def _needs_no_gather(self) -> bool:
        """Whether every expert takes `capacity` pairs from every rank: no counts to gather."""
        return bool(self.drop_and_pad) and not self._counting.by_block

    def _decide_by_counts(self) -> None:
        """Choose the chain for this micro-batch, by what all ranks know."""
        if self._needs_no_gather:
            # All ranks know the capacity; each rank's number of tokens is known only to itself.
            pairs = self.capacity * self.config.num_moe_experts
            per_token = self.config.moe_router_topk * self.config.moe_expert_capacity_factor
            self._decide(max_tokens=int(pairs / per_token))
            return
        assert self._counts is not None, "the counts are not on the host yet"
        if (self._counts.hashes != self._counting.agreement).any():
            # They agreed at construction; only a copy with another configuration gets here.
            agree(rule_of(self.choice, self.config, self.layout), self.tp_ep_group)
        self._decide(self._counts.max_tokens, self._counts.list_width)

    def _decide(self, max_tokens: int, longest_list: int = 0, log: bool = True) -> None:
        decision = self.choice.decide(max_tokens, longest_list)
        if decision is self._decision:
            return
        self._decision = decision if log else None
        self.chain, self.num_chunks = decision.chain, decision.num_chunks
        if log:
            self._report(
                f"chain {self.chain.name}, {counted(self.num_chunks, 'chunk')}, "
                f"EP {self.ep_size} x ETP {self.tp_size} over "
                f"{counted(self.layout.num_nodes, 'node')}: {decision.reason}"
            )

    def _report(self, message: str) -> None:
        """Print a message once per pipeline stage: each may have its own choice."""
        if self._reports and message not in _reported:
            _reported.add(message)
            rank = dist.get_rank()
            where = "monta" if rank == 0 else f"monta, rank {rank}"
            # Printed, as Megatron prints what users should see; its log starts at WARNING.
            print(shown(f"{where}: {message}"), flush=True)

    def _permute(
        self, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stock's permutation: [T, H], [T, E] -> [N, H], [N]."""
        self.hidden_shape_before_permute = tokens.shape
        rows, row_probs, self.reversed_local_input_permutation_mapping, *_ = stock.permute(
            tokens,
            self.routing_map,
            probs=probs,
            num_out_tokens=int(self._pair_counts().sent.sum()),
            fused=self.config.moe_permute_fusion,
        )
        return rows, row_probs

    def _padded_to_capacity(self, routing_map: torch.Tensor) -> torch.Tensor:
        """The tokens that fill each expert to its capacity: [T, E] -> [T, 2E].

        Chosen as stock's permute does: an expert's routed tokens first, then tokens that were not
        routed to it, each kind in order. The two kinds are two classes of pairs.
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

    def _bind(self, counts: Any, list_width: int = 0) -> Exchange:
        return Exchange(
            bound=self.chain.bind(self._counting.layout, counts, self.num_chunks),
            groups=self.groups,
            sum_dtype=torch.promote_types(self.probs.dtype, torch.float32),
            monitor=self.monitor,
            list_width=list_width,
        )

    def _finish_shared_experts(self, rows: torch.Tensor) -> None:
        self.shared_experts.linear_fc2_forward(rows)
        self.shared_experts.post_forward_comm()

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Copy the counts to the host at `cuda_dtoh_point` and wait for them at `cuda_sync_point`.

        Stock's phases call this at every such point; ours need only one tensor on the host.
        """
        if self._needs_no_gather:
            return tokens_per_expert
        if point == self.cuda_dtoh_point:
            self._copy_counts_to_host()
        if point == self.cuda_sync_point:
            if self._counts_event is not None:
                with self._naming_the_exchange_of_counts():
                    self._counts_event.synchronize()
            assert self._counts_on_host is not None
            self._counts = self._counting.read(self._counts_on_host.numpy())
            if self.num_out_tokens is None:
                self.num_out_tokens = int(self._counts.pairs.sent.sum())
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

    def _pair_counts(self) -> Counts:
        """The counts of this micro-batch's pairs, on the host."""
        if self._needs_no_gather:
            sent_shape = (self.ep_size, self.num_local_experts)
            return Counts(
                sent=np.full(sent_shape, self.capacity),
                received=np.full((self.tp_size, *sent_shape), self.capacity),
            )
        assert self._counts is not None
        return self._counts.pairs


def reports_for_stage(exchange: dist.ProcessGroup, pg_collection: Any) -> bool:
    """Whether this rank reports for its pipeline stage: the first rank of its first exchange."""
    exchanges = getattr(pg_collection, "expt_dp", None)
    if exchanges is None:
        return dist.get_rank() == 0
    return all(dist.get_group_rank(group, dist.get_rank()) == 0 for group in (exchange, exchanges))


def _share_time_limit(groups: Mapping[str, PeerGroup]) -> None:
    """Let Megatron change our groups' time limit with its own's.

    It does after the first iterations (--distributed-timeout-seconds-after-init), for those in this
    list.
    """
    known = parallel_state._global_process_group_list
    if known is not None:
        known += [each.process_group for each in groups.values() if each.process_group not in known]
