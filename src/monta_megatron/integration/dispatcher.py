"""The token dispatcher: Megatron's six phases with a chain in the two that communicate.

    phase                  stock alltoall             here
    dispatch_preprocess    counts, permute            counts for the chain; permute, or nothing
    token_dispatch         A2A(EP)                    the chain: A2A(EP) | AG(ETP) | Permute ...
    dispatch_postprocess   AG(ETP), sort by expert    counts alone
    combine_preprocess     unsort, RS(ETP)            nothing
    token_combine          A2A(EP)                    the chain's transpose
    combine_postprocess    unpermute                  unpermute, or nothing

As in stock, the host waits for the counts once: in dispatch_preprocess before the rows enter the
chain, or in token_dispatch. Then `_bound` chooses the chain and binds it to them.

    chain's rows     experts of a token   waits first   rows to permute
    not yet chosen   any                  yes           as below, once chosen
    tokens           any                  no            none
    permuted tokens  top-k                no            T * top-k, cut by `_as_counted`
    permuted tokens  padded to capacity   no            E * capacity
    permuted tokens  any other number     yes           as counted

CUDA graphs that capture the permutation cannot wait before it, so they permute T * top-k rows, or
E * capacity, before there is a choice.

Chains of permuted tokens leave permuting and the sums over experts to Megatron; chains of tokens
copy and sum tokens themselves, in fp32. With moe_monta_overlap_experts, chain, experts and
transpose may run as one pipeline between token_dispatch and token_combine, which then do nothing
(`compute`; `experts` calls it).
"""

import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from monta_megatron.chains import CHAINS
from monta_megatron.chains.chain import Rows
from monta_megatron.common.errors import UserError
from monta_megatron.core import Choice
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.monitor import Monitor, TimedExchange
from monta_megatron.exchange.pipeline import Experts, run_pipeline
from monta_megatron.exchange.rows import expert_ids_of
from monta_megatron.integration.count_sources import (
    ReadCounts,
    capacity_of,
    counts_of_capacity,
    demands_order,
    padded,
    replaces_preprocess,
)
from monta_megatron.integration.layer_setup import set_up_layer, streams_line

# Since 0.18, both communication phases make overlapped shared experts wait for the caller's stream,
# and token_combine runs their second layer; earlier releases run it in combine_postprocess.
SHARED_EXPERTS_WAIT = hasattr(SharedExpertMLP, "wait_current_stream")
# Attributes that stock's phases set for each micro-batch and ours do not. Each describes stock's
# own collectives and sorts, of which another chain has none or others.
UNSET = (
    "input_splits",
    "output_splits",
    "output_splits_tp",
    "tokens_per_expert",
    "num_global_tokens_per_local_expert",
    "num_out_tokens",
    "capacity",
    "d2h_event",
)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A micro-batch whose chain is bound to its counts.

    Attributes:
        exchanges: the bound chain; one per chunk with the experts in the pipeline.
        ids_TW: experts of each token, which `token_dispatch` adds for `compute`.
        timed: this exchange on the clock of the iteration; None where it is not timed.
    """

    exchanges: tuple[Exchange, ...]
    ids_TW: torch.Tensor | None = None
    timed: TimedExchange | None = None

    @property
    def num_source_rows(self) -> int:
        """Rows that enter a chain that is not split with its experts."""
        return int(self.exchanges[0].bound_chain.num_source_rows)


def rows_of(choice: Choice | None) -> Rows | None:
    """Rows of the chain of a choice; None without one."""
    return None if choice is None else CHAINS[choice.chain].rows


class MontaTokenDispatcher(stock.MoEAlltoAllTokenDispatcher):
    """Runs the exchange of an MoE layer as a pipelined chain, forward and backward.

    Unlike stock alltoall it does not call `preprocess`, and has no attribute of `UNSET` unless a
    framework sets one.

    Attributes:
        setup: options, layout and planner.
        chooser: makes the choice of each optimizer step.
        groups: process groups by the group names of the chains.
        monitor: counts bytes by resource; may record starts and waits.
        moe_layer: weak reference to the MoE layer of this dispatcher; None before it has one.
        choice: of the last micro-batch; before the first, the step's. None until it is known.
        micro_batch: the current one, from when its counts are here until `token_combine`.
        received_rows: by rank, in the exchange before the last; it came with the last counts.
        joined_counts: [J]; CUDA graphs replay it by name. None if capacity fixes the counts.
    """

    # Waits for the counts of the current micro-batch.
    _read_counts: ReadCounts

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Build the dispatcher for one MoE layer.

        Raises:
            UserError: an option is out of range, the chain cannot run on this layout, or the
                configuration asks for something that this dispatcher does not support; the message
                names the field.
        """
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        self.setup = set_up_layer(
            config,
            num_local_experts,
            {"ep": self.ep_group, "etp": self.tp_group, "tp_ep": self.tp_ep_group},
            captures=self.cuda_dtoh_point != "before_permutation_1",
            pg_collection=pg_collection,
        )
        self.chooser = self.setup.chooser
        self.groups = self.setup.open_groups({})
        self.monitor = Monitor()
        self.moe_layer: weakref.ref[torch.nn.Module] | None = None
        self.choice: Choice | None = self.chooser.step_choice
        self.micro_batch: MicroBatch | None = None
        self.received_rows = np.zeros(len(self.setup.layout.nodes), dtype=np.int64)
        self.joined_counts: torch.Tensor | None = None
        # Choices whose first use has been checked.
        self._checked: set[Choice] = set()
        # Rows that this rank's experts received in the last exchange.
        self._num_received = 0
        # Stock's constructor sets some of them to None.
        for name in UNSET:
            self.__dict__.pop(name, None)
        # CUDA graphs read every attribute in cudagraph_attrs.
        self.reversed_local_input_permutation_mapping = None
        self.cudagraph_attrs[:] = [name for name in self.cudagraph_attrs if name not in UNSET]
        self.cudagraph_attrs.append("joined_counts")

    def __getattr__(self, name: str) -> Any:
        """Say of an attribute that stock has why it is not here.

        Raises:
            AttributeError: always; Python asks here only for what is not set.
        """
        reason = ""
        if name in UNSET:
            reason = (
                ": it describes the collectives and sorts of stock's alltoall, and this dispatcher "
                "runs a chain instead; the rows of each expert are the second result of "
                "dispatch_postprocess"
            )
        raise AttributeError(f"{type(self).__name__} does not set {name}{reason}")

    @property
    def computes(self) -> bool:
        """Whether the experts of the bound micro-batch run in the pipeline, by `compute`."""
        return self.choice is not None and self.choice.splits_experts

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Start the count exchange, and permute if the chain's rows are permuted tokens.

        [seq / TP, batch, H] or [T, H], [T, E] bool, [T, E] -> [N, H], [N] in expert order; or
        [T, H], [T, E].
        """
        assert probs.dim() == routing_map.dim() == 2, "as for stock: [T, E]"
        assert routing_map.dtype == torch.bool, "as for stock"
        self.hidden_shape = hidden_states.shape
        # Kernels need contiguous rows.
        self.probs = probs_TE = probs.contiguous()
        self.groups = self.setup.open_groups(self.groups)
        self.routing_map = padded(routing_map.contiguous(), self.config)
        captures = self.setup.captures
        if not self.drop_and_pad:
            # A graph would replay the number of its capture.
            num_received = 0 if captures else self._num_received
            tag = self.chooser.tag(self._is_training)
            self.joined_counts = self.setup.counts.collect(self.routing_map, tag, num_received)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.choice, self.micro_batch = self.chooser.step_choice, None
        num_rows = self._num_permuted()
        if not captures:
            self._read_counts = self._copy_counts()
            permutes = rows_of(self.choice) == "permuted tokens"
            if self.choice is None or (permutes and num_rows is None):
                self.micro_batch = self._bound(self._read_counts)
                num_rows = num_rows or self.micro_batch.num_source_rows
        # [seq / TP, batch, H] -> [T, H]
        return self._enter(hidden_states.view(-1, self.hidden_shape[-1]), probs_TE, num_rows)

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move rows and probabilities to their experts.

        They arrive in the order (local expert, ETP rank, EP rank, token). With the experts in the
        pipeline nothing is sent yet: returns [T, H] and the probabilities [T, W].
        """
        if self.shared_experts is not None and SHARED_EXPERTS_WAIT:
            self.shared_experts.wait_current_stream()
        lists = None
        if self.setup.captures:
            # A graph has replayed dispatch_preprocess without running its Python.
            self.groups = self.setup.open_groups(self.groups)
            self.choice, self.micro_batch = self.chooser.step_choice, None
            self._read_counts = self._copy_counts()
        if self.micro_batch is None:
            if self._has_topk and rows_of(self.choice) == "tokens":
                # Launched while the counts are on their way. A recomputation may know its choice
                # earlier than its forward pass did, but makes the same lists.
                lists = self._list_experts(permuted_probs, self.config.moe_router_topk)
            self.micro_batch = self._bound(self._read_counts)
        batch = self.micro_batch
        rows_NH, probs, ids_TW = self._columns(
            batch, permutated_local_input_tokens, permuted_probs, lists
        )
        shared_fc1 = None
        if self.shared_experts is not None:
            shared_fc1 = self.shared_experts.linear_fc1_forward_and_act
        if not self.computes:
            return dispatch(batch.exchanges[0], rows_NH, probs, ids_TW, shared_fc1)
        self.micro_batch = replace(batch, ids_TW=ids_TW)
        if shared_fc1 is not None:
            shared_fc1()
        return rows_NH, probs

    def compute(
        self, experts: Experts, tokens_TH: torch.Tensor, probs_TW: torch.Tensor
    ) -> torch.Tensor:
        """Run chain, experts and transpose by chunks: [T, H], [T, W] -> [T, H], summed by token."""
        batch = self._batch
        assert batch.ids_TW is not None, "only tokens are split with their experts"
        return run_pipeline(batch.exchanges, tokens_TH, probs_TW, batch.ids_TW, experts)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add the rows of each expert: [L] int64 on the host. Rows are in expert order already."""
        (exchange,) = self._batch.exchanges
        tokens_per_expert_L = torch.from_numpy(exchange.bound_chain.rows_per_local_expert)
        return global_input_tokens, tokens_per_expert_L, global_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Do nothing: the transpose takes the rows in the order in which the experts leave them."""
        return hidden_states

    def token_combine(
        self,
        hidden_states: torch.Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> torch.Tensor:
        """Bring the experts' rows back: [rows of the local experts, H] -> [N, H] or [T, H]."""
        # The two flags belong to other dispatchers; stock alltoall ignores them too.
        if self.shared_experts is not None and SHARED_EXPERTS_WAIT:
            self.shared_experts.wait_current_stream()
        batch, rows_NH = self._batch, hidden_states
        if not self.computes:
            rows_NH = combine(batch.exchanges[0], rows_NH)
        if batch.timed is not None and rows_NH.requires_grad:
            rows_NH.register_hook(batch.timed.train)
        # For the next counts; in `_bound` it would delay the first collective.
        self._num_received = int(sum(each.bound_chain.num_expert_rows for each in batch.exchanges))
        # Autograd holds the exchanges until the backward passes have run.
        self.micro_batch = None
        # Before 0.18 stock's combine_postprocess does this, which only permuted tokens go through.
        if self.shared_experts is not None and (
            SHARED_EXPERTS_WAIT or rows_of(self.choice) == "tokens"
        ):
            self.shared_experts.linear_fc2_forward(rows_NH)
            self.shared_experts.post_forward_comm()
        return rows_NH

    # Rows of both kinds enter in `_enter`, are sent as `_columns` and leave here.

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Leave the chain: [N, H] or [T, H] -> [seq / TP, batch, H]; add the shared experts."""
        if rows_of(self.choice) != "tokens":
            output: torch.Tensor = super().combine_postprocess(permutated_local_input_tokens)
            return output
        output = permutated_local_input_tokens.view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    @property
    def _batch(self) -> MicroBatch:
        assert self.micro_batch is not None, "token_dispatch comes first"
        return self.micro_batch

    def _enter(
        self, tokens_TH: torch.Tensor, probs_TE: torch.Tensor, num_rows: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enter the chain: [T, H], [T, E] -> [N, H], [N] in expert order; or the same tensors."""
        if rows_of(self.choice) == "tokens":
            if self.config.overlap_moe_expert_parallel_comm:
                # The 1F1B schedule frees the inputs of token_dispatch, but autograd saved these.
                return tokens_TH.clone(), probs_TE.clone()
            return tokens_TH, probs_TE
        self.hidden_shape_before_permute = tokens_TH.shape
        by_map = demands_order(self.config)
        rows_NH, probs_N, permutation, *more = stock.permute(
            tokens_TH,
            self.routing_map,
            probs=probs_TE,
            num_out_tokens=num_rows,
            fused=self.config.moe_permute_fusion,
            drop_and_pad=self.drop_and_pad,
            **({"return_batch_invariant_inverse_map": True} if by_map else {}),
        )
        if by_map:
            self.batch_invariant_inverse_permutation_mapping = more[0]
        self.reversed_local_input_permutation_mapping = permutation
        return rows_NH, probs_N

    def _columns(
        self,
        batch: MicroBatch,
        rows_NH: torch.Tensor,
        probs: torch.Tensor,
        lists: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Columns of the chain from the result of `_enter` and `lists` of the experts, if made yet.

        [N, H], [N] -> [N, H], [N], no ids; or [T, H], [T, E] -> [T, H], [T, W], ids [T, W].
        """
        if rows_of(self.choice) == "permuted tokens":
            return *self._as_counted(rows_NH, probs, batch.num_source_rows), None
        width = batch.exchanges[0].max_experts_per_token
        if lists is None or lists[1].shape[1] != width:
            lists = self._list_experts(probs, width)
        return rows_NH, *lists

    def _list_experts(
        self, probs_TE: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return expert_ids_of(self.routing_map, probs_TE, width, self.setup.is_fused)

    def _as_counted(
        self, rows_NH: torch.Tensor, probs_N: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut T * top-k permuted rows to those of the map, which `permute` puts first.

        Raises:
            UserError: the map holds more.
        """
        if rows_NH.shape[0] == num_rows:
            return rows_NH, probs_N
        if rows_NH.shape[0] < num_rows:
            raise UserError(
                f"routing_map: holds {num_rows} token-expert pairs, must hold at most the "
                f"{rows_NH.shape[0]} of moe_router_topk experts of each token; where a framework's "
                "maps hold more, it has to replace MoEAlltoAllTokenDispatcher.preprocess, as "
                "stock's alltoall needs too"
            )
        if not self.config.moe_permute_fusion:
            mapping = self.reversed_local_input_permutation_mapping
            assert mapping is not None, "permuted"
            self.reversed_local_input_permutation_mapping = mapping[:num_rows]
        return rows_NH[:num_rows], probs_N[:num_rows]

    def _copy_counts(self) -> ReadCounts:
        """Start to copy the counts to the host; returns a function that waits for them."""
        if self.drop_and_pad:
            capacity = capacity_of(self.routing_map, self.config)
            return partial(counts_of_capacity, capacity, self.setup.layout, self.config)
        assert self.joined_counts is not None, "collected"
        return self.setup.counts.copy_to_host(self.joined_counts, self.cuda_dtoh_stream)

    @property
    def _has_topk(self) -> bool:
        """Whether every token should have top-k experts."""
        config = self.config
        has_others = config.moe_expert_capacity_factor is not None or replaces_preprocess()
        return not has_others and not config.moe_router_padding_for_quantization

    def _num_permuted(self) -> int | None:
        """Rows to permute, if known before the counts."""
        if self.drop_and_pad:
            return capacity_of(self.routing_map, self.config) * self.routing_map.shape[1]
        if self._has_topk or self.setup.captures:
            return len(self.routing_map) * self.config.moe_router_topk
        return None

    def _bound(self, read_counts: ReadCounts) -> MicroBatch:
        """Wait for the counts of a micro-batch, choose, and bind the chain to them.

        A choice is checked before its first use.
        """
        counts = read_counts()
        choice = self.chooser.choose(counts, self.probs.device)
        assert self.choice in (None, choice), f"entered for {self.choice}, chosen: {choice}"
        self.choice = choice
        self.received_rows = counts.received_rows.copy()
        if choice not in self._checked:
            self._check(choice)
        exchanges = self.setup.bind(
            choice,
            counts,
            groups=self.groups,
            prob_dtype=self.probs.dtype,
            monitor=self.monitor,
            least_width=self.config.moe_router_topk if self._has_topk else 0,
        )
        return MicroBatch(exchanges=exchanges, timed=self.chooser.time_exchange(self, counts))

    @property
    def _is_training(self) -> bool:
        layer = None if self.moe_layer is None else self.moe_layer()
        return torch.is_grad_enabled() if layer is None else layer.training

    def _check(self, choice: Choice) -> None:
        """Run the round trip with known answer, before a choice first carries rows."""
        setup = self.setup
        if setup.options.check and self.tp_ep_group.size() > 1:
            # Only trainings that check import it.
            from monta_megatron.integration.first_use import FirstUse

            FirstUse(
                choice=choice,
                setup=setup,
                groups=self.groups,
                hidden_size=self.hidden_shape[-1],
                prob_dtype=self.probs.dtype,
                device=self.probs.device,
            ).check()
        if self.probs.is_cuda:
            setup.report(streams_line(self.probs.device))
        self._checked.add(choice)
