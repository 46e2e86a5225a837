"""The token dispatcher: Megatron's six phases with a chain in the two that communicate.

    phase                  stock alltoall             here
    dispatch_preprocess    counts, permute            counts for the chain; permute, or nothing
    token_dispatch         A2A(EP)                    the chain: A2A(EP) | AG(ETP) | Permute ...
    dispatch_postprocess   AG(ETP), sort by expert    counts alone
    combine_preprocess     unsort, RS(ETP)            nothing
    token_combine          A2A(EP)                    the chain's transpose
    combine_postprocess    unpermute                  unpermute, or nothing

As in stock, the host waits for the counts once, in dispatch_preprocess or in token_dispatch (see
`MicroBatch.waits_to_enter`). Then `_bound` chooses the chain and binds it to them.

Chains of permuted tokens leave permuting and its sums to Megatron, bit for bit; chains of tokens
copy and sum tokens themselves, in fp32. With moe_monta_overlap_experts, chain, experts and
transpose may run as one pipeline between token_dispatch and token_combine, which then do nothing
(`compute`; `experts` calls it).
"""

import weakref
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from monta_megatron.chains import CHAINS, ChainCounts
from monta_megatron.chains.chain import Rows
from monta_megatron.common.errors import UserError
from monta_megatron.core import Choice
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.pipeline import Experts, blocks_of_chunks, run_pipeline
from monta_megatron.exchange.rows import expert_ids_of
from monta_megatron.integration.count_sources import (
    ReadCounts,
    capacity_of,
    counts_of_capacity,
    demands_order,
    padded,
    replaces_preprocess,
)
from monta_megatron.integration.layer_setup import set_up_layer
from monta_megatron.integration.supported_settings import check_supported

# Since 0.18, both communication phases make overlapped shared experts wait for the caller's stream,
# and token_combine runs their second layer; earlier releases run it in combine_postprocess.
SHARED_EXPERTS_WAIT = hasattr(SharedExpertMLP, "wait_current_stream")


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """State of one micro-batch, from dispatch_preprocess until it has left the layer.

    Attributes:
        choice: of this micro-batch: the step's; if None, known once it is bound.
        has_topk: every token should have top-k experts.
        num_permuted: rows to permute, if known before the counts; see `waits_to_enter`.
        read_counts: waits for its counts; None before they are on their way, and once it is bound.
        exchanges: the chain, bound to the counts; one per chunk with the experts in the pipeline.
            Empty until it is bound.
        ids_TW: ids of each token's experts, for `compute`.
    """

    choice: Choice | None
    has_topk: bool = False
    num_permuted: int | None = None
    read_counts: ReadCounts | None = None
    exchanges: tuple[Exchange, ...] = ()
    ids_TW: torch.Tensor | None = None

    @property
    def rows(self) -> Rows | None:
        """Rows of the chain; None while none is chosen."""
        return None if self.choice is None else CHAINS[self.choice.chain].rows

    @property
    def waits_to_enter(self) -> bool:
        """Whether its counts have to be here before its rows enter the chain.

            chain's rows     experts of a token   waits   rows to permute
            not yet chosen   any                  yes     as below, once chosen
            tokens           any                  no      none
            permuted tokens  top-k                no      T * top-k, cut by `_as_counted`
            permuted tokens  padded to capacity   no      E * capacity
            permuted tokens  any other number     yes     as counted

        CUDA graphs that capture the permutation cannot wait before it, so they permute T * top-k
        rows, or E * capacity, before there is a choice.
        """
        if self.rows == "tokens" or self.read_counts is None:
            return False
        return self.rows is None or self.num_permuted is None


class MontaTokenDispatcher(stock.MoEAlltoAllTokenDispatcher):
    """Runs the exchange of an MoE layer as a pipelined chain, forward and backward.

    Attributes:
        setup: options, layout and planner.
        chooser: makes the choice of each optimizer step.
        groups: process groups by the group names of the chains.
        monitor: counts bytes by resource; may record starts and waits.
        moe_layer: weak reference to the MoE layer of this dispatcher; None before it has one.
        micro_batch: the current one, or the last.
        received_rows: by rank, in the exchange before the last; it came with the last counts.
        joined_counts: [J]; CUDA graphs replay it by name. None if capacity fixes the counts.
    """

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
        check_supported(config)
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
        self.micro_batch = MicroBatch(choice=self.chooser.step_choice)
        self.received_rows = np.zeros(len(self.setup.layout.nodes), dtype=np.int64)
        self.joined_counts: torch.Tensor | None = None
        self._counts = self.setup.counts
        # Choices whose first use has been checked.
        self._checked: set[Choice] = set()
        # Rows that this rank's experts received in the last exchange.
        self._num_received = 0
        # CUDA graphs read every attribute in cudagraph_attrs, set by our phases or not.
        self.tokens_per_expert = self.num_global_tokens_per_local_expert = None
        self.num_out_tokens = self.reversed_local_input_permutation_mapping = None
        self.cudagraph_attrs.append("joined_counts")

    @property
    def choice(self) -> Choice | None:
        """The choice of the last micro-batch; None before the first."""
        return self.micro_batch.choice

    @property
    def computes(self) -> bool:
        """Whether the experts of this micro-batch run in the pipeline, by `compute`."""
        choice = self.micro_batch.choice
        return choice is not None and choice.splits_experts

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Start the count exchange, and permute if the chain's rows are permuted tokens.

        [seq / TP, batch, H] or [T, H], [T, E] bool, [T, E] -> [N, H], [N] in expert order; or
        [T, H], [T, E].
        """
        self.hidden_shape = hidden_states.shape
        # Kernels need contiguous rows.
        self.probs = probs_TE = probs.contiguous()
        self.groups = self.setup.open_groups(self.groups)
        self.routing_map = padded(routing_map.contiguous(), self.config)
        captures = self.setup.captures
        if not self.drop_and_pad:
            # A graph would replay the number of its capture.
            num_received = 0 if captures else self._num_received
            tag = self.chooser.tag
            self.joined_counts = self._counts.collect(self.routing_map, tag, num_received)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        batch = self._new_micro_batch(None if captures else self._copy_counts())
        if batch.waits_to_enter:
            batch = self._bound(batch)
        self.micro_batch = batch
        # [seq / TP, batch, H] -> [T, H]
        return self._enter(batch, hidden_states.view(-1, self.hidden_shape[-1]), probs_TE)

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move rows and probabilities to their experts.

        They arrive in the order (local expert, ETP rank, EP rank, token). With the experts in the
        pipeline nothing is sent yet: returns [T, H] and the probabilities [T, W].
        """
        if self.shared_experts is not None and SHARED_EXPERTS_WAIT:
            self.shared_experts.wait_current_stream()
        batch, lists = self.micro_batch, None
        if self.setup.captures:
            # A graph has replayed dispatch_preprocess without running its Python.
            batch = self._new_micro_batch(self._copy_counts())
        if batch.has_topk and batch.rows == "tokens":
            # Launched while the counts are on their way. A recomputation may know its choice
            # earlier than its forward pass did, but makes the same lists.
            topk = self.config.moe_router_topk
            lists = self._list_experts(permuted_probs, topk)
        if not batch.exchanges:
            batch = self._bound(batch)
        rows_NH, probs, ids_TW = self._columns(
            batch, permutated_local_input_tokens, permuted_probs, lists
        )
        self.micro_batch = batch
        if self.computes:
            self.micro_batch = replace(batch, ids_TW=ids_TW)
        else:
            rows_NH, probs = dispatch(batch.exchanges[0], rows_NH, probs, ids_TW)
        if self.shared_experts is not None:
            overlapped = () if self.computes else (rows_NH,)
            self.shared_experts.linear_fc1_forward_and_act(*overlapped)
        return rows_NH, probs

    def compute(
        self, experts: Experts, tokens_TH: torch.Tensor, probs_TW: torch.Tensor
    ) -> torch.Tensor:
        """Run chain, experts and transpose by chunks: [T, H], [T, W] -> [T, H], summed by token."""
        batch = self.micro_batch
        assert batch.ids_TW is not None, "only tokens are split with their experts"
        return run_pipeline(batch.exchanges, tokens_TH, probs_TW, batch.ids_TW, experts)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add the rows of each expert: [L] int64 on the host. Rows are in expert order already."""
        (exchange,) = self.micro_batch.exchanges
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
        batch, rows_NH = self.micro_batch, hidden_states
        if not self.computes:
            rows_NH = combine(batch.exchanges[0], rows_NH)
        # For the next counts; in `_bound` it would delay the first collective.
        self._num_received = int(sum(each.bound_chain.num_expert_rows for each in batch.exchanges))
        # Autograd holds the exchanges until the backward passes have run.
        self.micro_batch = MicroBatch(choice=batch.choice)
        # Before 0.18 stock's combine_postprocess does this, which only permuted tokens go through.
        if self.shared_experts is not None and (SHARED_EXPERTS_WAIT or batch.rows == "tokens"):
            self.shared_experts.linear_fc2_forward(rows_NH)
            self.shared_experts.post_forward_comm()
        return rows_NH

    # Rows of both kinds enter in `_enter`, are sent as `_columns` and leave here.

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Leave the chain: [N, H] or [T, H] -> [seq / TP, batch, H]; add the shared experts."""
        if self.micro_batch.rows != "tokens":
            output: torch.Tensor = super().combine_postprocess(permutated_local_input_tokens)
            return output
        output = permutated_local_input_tokens.view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    def _enter(
        self, batch: MicroBatch, tokens_TH: torch.Tensor, probs_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enter the chain: [T, H], [T, E] -> [N, H], [N] in expert order; or the same tensors."""
        if batch.rows == "tokens":
            if self.config.overlap_moe_expert_parallel_comm:
                # The 1F1B schedule frees the inputs of token_dispatch, but autograd saved these.
                return tokens_TH.clone(), probs_TE.clone()
            return tokens_TH, probs_TE
        self.hidden_shape_before_permute = tokens_TH.shape
        num_rows, by_map = batch.num_permuted, demands_order(self.config)
        if num_rows is None:
            num_rows = int(batch.exchanges[0].bound_chain.num_source_rows)
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
        if batch.rows == "permuted tokens":
            num_rows = int(batch.exchanges[0].bound_chain.num_source_rows)
            return *self._as_counted(rows_NH, probs, num_rows), None
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
        return self._counts.copy_to_host(self.joined_counts, self.cuda_dtoh_stream)

    def _new_micro_batch(self, read_counts: ReadCounts | None) -> MicroBatch:
        config, num_permuted = self.config, None
        has_topk = config.moe_expert_capacity_factor is None and not replaces_preprocess()
        has_topk = has_topk and not config.moe_router_padding_for_quantization
        if self.drop_and_pad:
            num_permuted = capacity_of(self.routing_map, config) * self.routing_map.shape[1]
        elif has_topk or self.setup.captures:
            num_permuted = len(self.routing_map) * config.moe_router_topk
        return MicroBatch(
            choice=self.chooser.step_choice,
            has_topk=has_topk,
            num_permuted=num_permuted,
            read_counts=read_counts,
        )

    def _bound(self, batch: MicroBatch) -> MicroBatch:
        """Wait for the counts of a micro-batch, and return it with its choice and exchanges.

        A choice is checked before its first use.
        """
        assert batch.read_counts is not None, "not on their way to the host"
        counts, layer = batch.read_counts(), None if self.moe_layer is None else self.moe_layer()
        is_training = torch.is_grad_enabled() if layer is None else layer.training
        choice = self.chooser.choose(counts, is_training, self.probs.device)
        assert batch.choice in (None, choice), f"entered for {batch.choice}, chosen: {choice}"
        self.received_rows = counts.received_rows.copy()
        if choice not in self._checked:
            self._check(choice)
        chain, num_chunks, width = CHAINS[choice.chain], choice.num_chunks, 0
        sum_dtype = torch.float32
        if chain.rows == "permuted tokens":
            counts_by_exchange: list[ChainCounts] = [counts.permuted_tokens]
            # Megatron reduces over the expert tensor parallel group in the probabilities' dtype.
            sum_dtype = torch.promote_types(self.probs.dtype, torch.float32)
        else:
            assert counts.tokens is not None, "counted for chains of tokens"
            least = self.config.moe_router_topk if batch.has_topk else 0
            width, counts_by_exchange = max(least, counts.max_experts_per_token), [counts.tokens]
            if choice.splits_experts:
                blocks = blocks_of_chunks(counts.tokens.tokens.shape[1], num_chunks)
                counts_by_exchange = [counts.tokens.of_blocks(*each) for each in blocks]
                num_chunks = 1
        exchanges = tuple(
            Exchange(
                bound_chain=chain.bind(self.setup.layout, each, num_chunks),
                groups=self.groups,
                sum_dtype=sum_dtype,
                monitor=self.monitor,
                max_experts_per_token=width,
                fused=self.setup.is_fused,
            )
            for each in counts_by_exchange
        )
        return replace(batch, choice=choice, read_counts=None, exchanges=exchanges)

    def _check(self, choice: Choice) -> None:
        """Run the round trip with known answer, before a choice first carries rows."""
        setup = self.setup
        if setup.options.check and self.tp_ep_group.size() > 1:
            # Only trainings that check import it.
            from monta_megatron.integration.first_use import FirstUse

            FirstUse(
                choice=choice,
                count_messages=setup.counts.count_messages,
                group=self.tp_ep_group,
                groups=self.groups,
                hidden_size=self.hidden_shape[-1],
                dtype=self.config.params_dtype,
                prob_dtype=self.probs.dtype,
                topk=self.config.moe_router_topk,
                device=self.probs.device,
                fused=setup.is_fused,
            ).check()
        self._checked.add(choice)
