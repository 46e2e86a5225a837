"""The token dispatcher: Megatron's six phases with a chain in the two that communicate.

    phase                  stock alltoall             here
    dispatch_preprocess    counts, permute            counts for the chain, `enter`
    token_dispatch         A2A(EP)                    the chain: A2A(EP) | AG(ETP) | Permute ...
    dispatch_postprocess   AG(ETP), sort by expert    counts alone
    combine_preprocess     unsort, RS(ETP)            nothing
    token_combine          A2A(EP)                    the chain's transpose
    combine_postprocess    unpermute                  `leave`

With moe_monta_overlap_experts, chain, experts and transpose run as one pipeline between
token_dispatch and token_combine, which then do nothing (`compute`; `layer` calls it).

The rows that enter and leave depend on the chain (`strategies`). Once the counts are on the
host, they become one `Exchange`, which both directions and their backward passes share.

Notation: H = hidden size, T = tokens of this rank, E = number of experts, L = local experts,
EP and ETP = sizes of the expert parallel and expert tensor parallel groups, N = rows.
"""

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from monta_megatron.chains.chain import Rows
from monta_megatron.chains.counts import num_counted_blocks
from monta_megatron.common.torch_private import is_usable
from monta_megatron.common.units import counted
from monta_megatron.core import Layout
from monta_megatron.exchange.collectives import PeerGroup, are_open, peer_groups
from monta_megatron.exchange.counts import CountTable, ExchangeCounts
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.kernel_choice import agreed_kernels, device_type
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.state import Exchange
from monta_megatron.integration.controller import controller_of
from monta_megatron.integration.options import AUTO, Options
from monta_megatron.integration.policy import agreed_policy
from monta_megatron.integration.ranks import (
    Report,
    iteration_here,
    nodes_of_exchange,
    on_every_exchange,
    reports_for_stage,
)
from monta_megatron.integration.strategies import (
    STRATEGIES,
    WHOLE_TOKENS,
    CapacityCounts,
    CountExchange,
    PermutedTokens,
    WholeTokens,
    counts_are_patched,
)
from monta_megatron.integration.supported_settings import check_supported
from monta_megatron.planner.chain_policy import ChainChoice, ChainPolicy

if TYPE_CHECKING:
    from monta_megatron.exchange.pipeline import Experts

# Since 0.18, overlapped shared experts wait for the caller's stream in both communication phases,
# and run their second layer in token_combine; earlier releases run it in combine_postprocess.
SHARED_EXPERTS_WAIT = hasattr(SharedExpertMLP, "wait_current_stream")


class MontaTokenDispatcher(stock.MoEAlltoAllTokenDispatcher):
    """Runs the exchange of an MoE layer as a pipelined chain, forward and backward.

    Attributes:
        options: what the configuration asked for, checked.
        chain_policy: how the chain is chosen for every micro-batch.
        controller: asked for that choice, and told what was received.
        chain: the chain of the micro-batch under way.
        num_chunks: its number of chunks.
        experts_pipelined: whether its experts run in the pipeline.
        layout: this rank's position in the exchange.
        groups: the process group for each group name of the chains.
        monitor: bytes by resource; starts and waits go to its recorder, if it has one.
        exchange_counts: [K] what this rank needs of all ranks' counts, which CUDA graphs replay by
            name; None where capacity fixes them.
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
                configuration asks for something that this dispatcher does not support; the message
                names the field.
        """
        check_supported(config)
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        self.options = Options.of(config)
        self._stock_dispatcher = functools.partial(
            stock.MoEAlltoAllTokenDispatcher,
            num_local_experts,
            local_expert_indices,
            config,
            pg_collection,
        )
        self._megatron_groups: dict[str, dist.ProcessGroup] = {
            "ep": self.ep_group,
            "etp": self.tp_group,
            "tp_ep": self.tp_ep_group,
        }
        self._report = Report(reports_for_stage(self.tp_ep_group, pg_collection))
        replicas = getattr(pg_collection, "expt_dp", None)
        self.layout, self.chain_policy, rule = on_every_exchange(
            # The exchanges end their tuning together.
            self._set_up,
            replicas,
            {"moe_monta_tune_steps": self.options.tune_steps},
        )
        self.controller = controller_of(
            self.chain_policy, rule, self.tp_ep_group, replicas, self.options, self._report
        )
        if self.options.wire_dtype is not None:
            self._report("tokens travel in eight bits: results differ from alltoall's")
        chains = self.chain_policy.chains
        if self.options.overlap_experts and all(each.rows != "tokens" for each in chains):
            self._report(
                "moe_monta_overlap_experts: no layer is split, as no chain of tokens can run here"
            )
        self.groups: dict[str, PeerGroup] = {}
        self._make_groups()
        self.monitor = Monitor(pass_times=self.controller.pass_times)
        self._kinds_of_rows = {chain.rows for chain in chains}
        self._counts: CountExchange | CapacityCounts
        if self.drop_and_pad:
            self._counts = CapacityCounts(layout=self.layout, config=config)
        else:
            self._counts = CountExchange(
                count_table=CountTable(
                    chains=chains,
                    layout=self.layout,
                    num_blocks=num_counted_blocks(chains, self.chain_policy.num_blocks),
                    kernels=self.options.kernels,
                ),
                config=config,
                group=self.tp_ep_group,
                chain_name=chains[0].name if len(chains) == 1 else AUTO,
            )
        self.exchange_counts: torch.Tensor | None = None
        self.num_out_tokens: int | None = None
        self._exchange: Exchange | None = None
        # Those of its chunks, where the experts are in the pipeline.
        self._chunks: list[Exchange] = []
        self.experts_pipelined = False
        # Most experts of any token, as far as it is known before the counts are; and what was made
        # by it: from these probabilities, lists [T, W] of probabilities and experts.
        self.expected_width = config.moe_router_topk
        self.early_lists: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None
        # Rows that entered before the counts were known, see `token_dispatch`.
        self._entered_early: tuple[Rows, torch.Tensor] | None = None
        # Megatron reads every listed attribute, those too that our phases do not set.
        self.tokens_per_expert = self.num_global_tokens_per_local_expert = None
        self.reversed_local_input_permutation_mapping: torch.Tensor | None = None
        self.cudagraph_attrs.append("exchange_counts")
        # Until the first micro-batch's counts are known, the chain is that for one token.
        choice = self.chain_policy.choose(1)
        self._take(choice, message=choice.reason if len(chains) == 1 else "")

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count, and permute where rows are permuted tokens.

        [S/TP, B, H] or [T, H], [T, E] bool, [T, E] -> [N, H], [N] in expert order; or [T, H],
        [T, E].
        """
        self.hidden_shape = hidden_states.shape
        # Kernels take values of a row to lie side by side.
        self.probs = probs = probs.contiguous()
        # A pass that was abandoned, as by an error in the experts, has left them.
        self._exchange, self._chunks = None, []
        if not is_usable(self.tp_ep_group):
            raise ValueError(
                "moe_monta: the process groups that this model was built with were destroyed; "
                "build it again with those of now"
            )
        if not are_open(self.groups):
            self._make_groups()
        self.routing_map = self._padded(routing_map.contiguous())
        self.preprocess(self.routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self._maybe_dtoh_and_synchronize("before_permutation_1")
        # [S/TP, B, H] -> [T, H]
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        is_early = self.cuda_sync_point != "before_permutation_1"
        # A CUDA graph's tokens are gone when it is replayed, and the 1F1B schedule frees them.
        keeps_tokens = (
            self.cuda_dtoh_point == "before_permutation_1"
            and not self.config.overlap_moe_expert_parallel_comm
        )
        self._entered_early = (self.chain.rows, tokens) if is_early and keeps_tokens else None
        return self._strategy.enter(self, tokens, probs)

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move rows and probabilities to their experts.

        They arrive in the order (local expert, ETP rank, EP rank, token).
        """
        if self.shared_experts is not None and SHARED_EXPERTS_WAIT:
            self.shared_experts.wait_current_stream()
        rows, row_probs = permutated_local_input_tokens, permuted_probs
        if self.cuda_sync_point == "before_ep_alltoall":
            self._strategy.begin(self, row_probs)
        self._maybe_dtoh_and_synchronize("before_ep_alltoall")
        early, self._entered_early = self._entered_early, None
        if early is not None and early[0] != self.chain.rows:
            # A rank has another number of tokens than before, so another chain was chosen.
            rows, row_probs = self._strategy.enter(self, early[1], self.probs)
        else:
            tokens = None if early is None else early[1]
            rows, row_probs = self._strategy.as_counted(self, rows, row_probs, tokens)
        if self.computes:
            if self.shared_experts is not None:
                self.shared_experts.linear_fc1_forward_and_act()
            return rows, row_probs
        assert self._exchange is not None
        columns = self._strategy.columns(self, self._exchange, row_probs)
        rows, row_probs = dispatch(self._exchange, rows, *columns)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        return rows, row_probs

    @property
    def computes(self) -> bool:
        """Whether the experts of the micro-batch under way run in the pipeline, by `compute`."""
        return bool(self._chunks)

    def compute(
        self, experts: "Experts", tokens: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        """Exchange and compute by chunks: [T, H], [T, E] -> [T, H], the experts' sums by token."""
        from monta_megatron.exchange.pipeline import run_pipeline

        chunks = self._chunks
        row_probs, ids = self._strategy.columns(self, chunks[0], probs)
        assert ids is not None, "only tokens are split with their experts"
        return run_pipeline(chunks, tokens, row_probs, ids, experts)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add the experts' counts: [L] int64 on the host. The rows are in expert order already."""
        assert self._exchange is not None
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
        if self.computes:
            rows, self._chunks = hidden_states, []
        else:
            assert self._exchange is not None
            rows = combine(self._exchange, hidden_states)
            self._exchange = None
        # Before 0.18, Megatron's own last phase does this, which only permuted tokens go through.
        if self.shared_experts is not None and (SHARED_EXPERTS_WAIT or self.chain.rows == "tokens"):
            self.shared_experts.linear_fc2_forward(rows)
            self.shared_experts.post_forward_comm()
        return rows

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Unpermute where rows are permuted tokens: [N, H] or [T, H] -> [S/TP, B, H]."""
        return self._strategy.leave(self, permutated_local_input_tokens)

    def preprocess(self, routing_map: torch.Tensor) -> None:
        """Count by [T, E], with no sync.

        The counts are waited for before the permutation if they decide whether there is one, or
        how many rows it makes. Where each token should have top-k experts, so many rows are
        permuted, and `as_counted` corrects them; a framework that has replaced stock's own method
        has maps for which they have to be corrected always.
        """
        if self.options.check and routing_map.is_cuda and self.options.kernels != "torch":
            from monta_megatron.integration.checks import check_kernels

            check_kernels(self, routing_map.device)
        self.exchange_counts, self.num_out_tokens = self._counts.exchange(
            routing_map, self.controller.agreement
        )
        kinds = self._kinds_of_rows
        # The 1F1B schedule keeps no tokens, which may have to enter again.
        if len(kinds) > 1 and not self.config.overlap_moe_expert_parallel_comm:
            expected = self.controller.expected()
            if expected is not None:
                self.chain, kinds = expected.chain, {expected.chain.rows}
        decides_permutation = (
            self.num_out_tokens is None
            or len(kinds) > 1
            or (self.cuda_dtoh_point == "before_permutation_1" and counts_are_patched())
        )
        self.cuda_sync_point = (
            "before_permutation_1"
            if decides_permutation and "permuted tokens" in kinds
            else "before_ep_alltoall"
        )

    @property
    def _strategy(self) -> PermutedTokens | WholeTokens:
        """Strategy of the first and the last phase for the chain of the micro-batch under way."""
        return STRATEGIES[self.chain.rows]

    def _maybe_dtoh_and_synchronize(self, point: str) -> None:
        """Copy the counts to the host at `cuda_dtoh_point`; use them at `cuda_sync_point`."""
        if point == self.cuda_dtoh_point:
            self._counts.copy_to_host(self.exchange_counts, self.cuda_dtoh_stream)
        if point == self.cuda_sync_point:
            self._bind(self._counts.read())

    def _bind(self, counts: ExchangeCounts) -> None:
        """Choose the chain for this micro-batch from shared data, and bind it."""
        choice = self.controller.choose(counts, self.probs.device, self.cuda_dtoh_stream)
        self._take(choice, self.controller.change_message(choice, counts))
        self.monitor.choices[self.chain.name, self.num_chunks] += 1
        if self.options.check and self.tp_ep_group.size() > 1:
            from monta_megatron.integration.checks import check_chains

            chains = self.controller.chains_to_check(choice, counts)
            check_chains(self, self._stock_dispatcher, chains)
        self._chunks = []
        if self.experts_pipelined:
            self._chunks = WHOLE_TOKENS.bind_chunks(self, counts)
            return
        self._exchange = self._strategy.bind(self, counts)
        self.num_out_tokens = int(self._exchange.bound.num_source_rows)

    def _take(self, choice: ChainChoice, message: str) -> None:
        """Run a choice from here on, and report why if there is a message."""
        self.chain, self.num_chunks = choice.chain, choice.num_chunks
        self.experts_pipelined = (
            self.options.overlap_experts and self.num_chunks > 1 and self.chain.rows == "tokens"
        )
        if not message or not self._report.reports:
            return
        line = (
            f"chain {self.chain.name}, {counted(self.num_chunks, 'chunk')}"
            f"{' with their experts' * self.experts_pipelined}, "
            f"EP {self.ep_size} x ETP {self.tp_size} over "
            f"{counted(self.layout.num_nodes, 'node')}: {message}"
        )
        if self._report(line) and choice.benefit is not None:
            self._report(replace(choice.benefit, iteration=iteration_here(self)).text)

    def _padded(self, routing_map: torch.Tensor) -> torch.Tensor:
        """The map that is counted, padded where Megatron pads it: [T, E]."""
        if self.config.moe_router_padding_for_quantization:
            is_fused = stock.is_experimental_enabled() and self.config.moe_permute_fusion
            pad = stock.fused_pad_routing_map if is_fused else stock.pad_routing_map
            routing_map = pad(routing_map, stock.get_align_size_for_quantization(self.config))
        return routing_map

    def _make_groups(self) -> None:
        """Make those of our groups that are not open; all ranks of the exchange call this."""
        before, self.groups = (
            self.groups,
            peer_groups(self.chain_policy.chains, self.layout, self._megatron_groups),
        )
        # Megatron changes the time limit of the groups in this list after the first iterations
        # (--distributed-timeout-seconds-after-init): that of ours together with its own.
        known = parallel_state._global_process_group_list
        if known is not None:
            closed, ours = (
                [group.process_group for group in groups.values()]
                for groups in (before, self.groups)
            )
            known[:] = [group for group in known if group in ours or group not in closed]
            known += [group for group in ours if group not in known]

    def _set_up(self) -> tuple[Layout, ChainPolicy, dict[str, Any]]:
        """Layout, chain policy and its rule; raises on all ranks of the exchange, or on none."""
        nodes, note = nodes_of_exchange(self.options, self.tp_ep_group)
        if note is not None:
            self._report(note)
        layout = Layout(
            ep=self.ep_size,
            etp=self.tp_size,
            num_local_experts=self.num_local_experts,
            rank=dist.get_group_rank(self.tp_ep_group, dist.get_rank()),
            nodes=nodes,
        )
        # If capacity fixes the counts, none are exchanged; if CUDA graphs capture the permutation,
        # there has to be one. In both cases "auto" may choose only chains of permuted tokens.
        permuted_only = self.drop_and_pad or self.cuda_dtoh_point != "before_permutation_1"
        kernels, note = agreed_kernels(self.options.kernels, device_type(), self.tp_ep_group)
        if note is not None:
            self._report(note)
        self.options = options = replace(self.options, kernels=kernels)
        chain_policy, rule = agreed_policy(
            options, self.config, layout, permuted_only, self._megatron_groups
        )
        return layout, chain_policy, rule
