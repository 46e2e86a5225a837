"""The token dispatcher: Megatron's six phases with a chain in the two that communicate.

    phase                  stock alltoall             here
    dispatch_preprocess    counts, permute            counts for the chain; permute, or nothing
    token_dispatch         A2A(EP)                    the chain: A2A(EP) | AG(ETP) | Permute ...
    dispatch_postprocess   AG(ETP), sort by expert    counts alone
    combine_preprocess     unsort, RS(ETP)            nothing
    token_combine          A2A(EP)                    the chain's transpose
    combine_postprocess    unpermute                  unpermute, or nothing

Chains of permuted tokens leave permuting and its sums to Megatron, bit for bit; chains of tokens
copy and sum tokens themselves, in fp32. With moe_monta_overlap_experts, chain, experts and
transpose may run as one pipeline between token_dispatch and token_combine, which then do nothing
(`compute`; `layer` calls it).

Notation: H = hidden size, T = tokens of this rank, E = number of experts, L = local experts,
EP and ETP = sizes of the expert parallel and expert tensor parallel groups, N = rows, W = most
experts of any token.
"""

import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from monta_megatron.chains import CHAINS, ChainCounts
from monta_megatron.chains.chain import Rows
from monta_megatron.chains.counts import num_counted_blocks
from monta_megatron.chains.pipelined_layer import blocks_of_chunks
from monta_megatron.common.torch_private import is_usable
from monta_megatron.common.units import counted
from monta_megatron.core import Choice, Layout
from monta_megatron.exchange.collectives import PeerGroup, are_open, peer_groups
from monta_megatron.exchange.counts import CountTable, ExchangeCounts, expert_ids_of
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.kernel_choice import agreed_kernels, device_type, is_fused
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.integration.auto import FixedChoice, chooser_of
from monta_megatron.integration.counts import (
    CapacityCounts,
    CountExchange,
    are_patched,
    demands_order,
)
from monta_megatron.integration.options import AUTO, Options
from monta_megatron.integration.planning import agreed_planner
from monta_megatron.integration.ranks import (
    Report,
    nodes_of_exchange,
    on_every_exchange,
    reports_for_stage,
)
from monta_megatron.integration.supported_settings import check_supported
from monta_megatron.planner.choose import Planner

if TYPE_CHECKING:
    from monta_megatron.exchange.pipeline import Experts

# Since 0.18, overlapped shared experts wait for the caller's stream in both communication phases,
# and run their second layer in token_combine; earlier releases run it in combine_postprocess.
SHARED_EXPERTS_WAIT = hasattr(SharedExpertMLP, "wait_current_stream")


@dataclass(kw_only=True)
class MicroBatch:
    """What belongs to one micro-batch, until it has left the layer.

    Attributes:
        choice: what runs; None while it follows from counts that are on their way.
        has_topk: the routing map has top-k experts of each token, so widths are known.
        exchanges: one; those of the chunks where the experts are in the pipeline.
        ids: [T, W] experts of each token, where the experts are in the pipeline.
    """

    choice: Choice | None
    has_topk: bool = False
    exchanges: list[Exchange] = field(default_factory=list)
    ids: torch.Tensor | None = None


class MontaTokenDispatcher(stock.MoEAlltoAllTokenDispatcher):
    """Runs the exchange of an MoE layer as a pipelined chain, forward and backward.

    Attributes:
        options: what the configuration asked for, checked.
        layout: this rank's position in the exchange.
        planner: what may run.
        chooser: says what runs, from one optimizer step to the next.
        groups: the process group for each group name of the chains.
        monitor: bytes by resource; starts and waits go to its recorder, if it has one.
        moe_layer: gives the MoE layer whose dispatcher this is, or None.
        micro_batch: the one under way.
        choice: of the last micro-batch.
        busiest_over_mean: rows of the busiest rank over the mean, in the exchange before the last.
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
        report = Report(reports_for_stage(self.tp_ep_group, pg_collection))
        self.layout, self.planner, self.chooser = on_every_exchange(
            lambda: self._set_up(report),
            getattr(pg_collection, "expt_dp", None),
            # Other numbers would make other iterations of one training compete.
            {"moe_monta_tune_steps": self.options.tune_steps},
        )
        self.groups: dict[str, PeerGroup] = {}
        self._make_groups()
        self.monitor = Monitor()
        self.moe_layer: weakref.ref[torch.nn.Module] | None = None
        chains = self.planner.chains
        self._counts: CountExchange | CapacityCounts
        if self.drop_and_pad:
            self._counts = CapacityCounts(layout=self.layout, config=config)
        else:
            self._counts = CountExchange(
                count_table=CountTable(
                    chains=chains,
                    layout=self.layout,
                    num_blocks=num_counted_blocks(chains, self.planner.num_blocks),
                    kernels=self.options.kernels,
                ),
                config=config,
                group=self.tp_ep_group,
                chain_name=chains[0].name if len(chains) == 1 else AUTO,
            )
        self.micro_batch = MicroBatch(choice=None)
        self.choice = self.chooser.choice
        # Choices of which there is nothing to check.
        self._checked: set[Choice] = set()
        self.busiest_over_mean: float | None = None
        # Of this rank's experts, in the last exchange.
        self._received_rows = 0
        self.exchange_counts: torch.Tensor | None = None
        self.num_out_tokens: int | None = None
        # Megatron reads every listed attribute, those too that our phases do not set.
        self.tokens_per_expert = self.num_global_tokens_per_local_expert = None
        self.reversed_local_input_permutation_mapping: torch.Tensor | None = None
        self.cudagraph_attrs.append("exchange_counts")

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
        if not is_usable(self.tp_ep_group):
            raise ValueError(
                "moe_monta: the process groups that this model was built with were destroyed; "
                "build it again with those of now"
            )
        if not are_open(self.groups):
            self._make_groups()
        self.micro_batch = self._new_micro_batch()
        self.routing_map = self._padded(routing_map.contiguous())
        self.preprocess(self.routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self._maybe_dtoh_and_synchronize("before_permutation_1")
        # [S/TP, B, H] -> [T, H]
        return self._enter(hidden_states.view(-1, self.hidden_shape[-1]), probs)

    def preprocess(self, routing_map: torch.Tensor) -> None:
        """Count by [T, E], with no sync.

        The counts are waited for before the permutation if they decide whether there is one, or
        how many rows it makes. Where each token should have top-k experts, so many rows are
        permuted, and `_as_counted` cuts them off; a framework that has replaced stock's own method
        has maps for which they have to be counted first.
        """
        self.exchange_counts, self.num_out_tokens = self._counts.exchange(
            routing_map, self.chooser.head, 0 if self._captures else self._received_rows
        )
        waits = self.micro_batch.choice is None and not self._captures
        if self._rows == "permuted tokens":
            waits |= self.num_out_tokens is None or (are_patched() and not self._captures)
        self.cuda_sync_point = "before_permutation_1" if waits else "before_ep_alltoall"

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move rows and probabilities to their experts.

        They arrive in the order (local expert, ETP rank, EP rank, token). Where the experts run in
        the pipeline, nothing moves yet: [T, H] and the probabilities [T, W] of its experts.
        """
        if self.shared_experts is not None and SHARED_EXPERTS_WAIT:
            self.shared_experts.wait_current_stream()
        if self._captures:
            # A graph has replayed the preprocessing, without its Python.
            self.micro_batch = self._new_micro_batch()
        batch, lists = self.micro_batch, None
        if batch.has_topk and self._rows == "tokens":
            # The device makes them while the counts travel. A recomputation makes them too, though
            # it may know its choice before the counts, and the forward pass did not.
            lists = self._lists(permuted_probs, self.config.moe_router_topk)
        self._maybe_dtoh_and_synchronize("before_ep_alltoall")
        rows, probs, ids = self._columns(permutated_local_input_tokens, permuted_probs, lists)
        if self.computes:
            batch.ids = ids
        else:
            rows, probs = dispatch(batch.exchanges[0], rows, probs, ids)
        if self.shared_experts is not None:
            overlapped = () if self.computes else (rows,)
            self.shared_experts.linear_fc1_forward_and_act(*overlapped)
        return rows, probs

    @property
    def computes(self) -> bool:
        """Whether the experts of the micro-batch under way run in the pipeline, by `compute`."""
        choice = self.micro_batch.choice
        return choice is not None and choice.splits_experts

    def compute(
        self, experts: "Experts", tokens: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        """Exchange and compute by chunks: [T, H], [T, W] -> [T, H], the experts' sums by token."""
        from monta_megatron.exchange.pipeline import run_pipeline

        batch = self.micro_batch
        assert batch.ids is not None, "only tokens are split with their experts"
        return run_pipeline(batch.exchanges, tokens, probs, batch.ids, experts)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add the experts' counts: [L] int64 on the host. The rows are in expert order already."""
        (exchange,) = self.micro_batch.exchanges
        tokens_per_expert = torch.from_numpy(exchange.bound.rows_per_local_expert)
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
        batch, rows = self.micro_batch, hidden_states
        if not self.computes:
            rows = combine(batch.exchanges[0], rows)
        # The backward passes hold what they need of it.
        batch.exchanges, batch.ids = [], None
        # Before 0.18, Megatron's own last phase does this, which only permuted tokens go through.
        if self.shared_experts is not None and (SHARED_EXPERTS_WAIT or self._rows == "tokens"):
            self.shared_experts.linear_fc2_forward(rows)
            self.shared_experts.post_forward_comm()
        return rows

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Unpermute, and add the shared experts' output: [N, H] or [T, H] -> [S/TP, B, H]."""
        if self._rows == "permuted tokens":
            output: torch.Tensor = super().combine_postprocess(permutated_local_input_tokens)
            return output
        output = permutated_local_input_tokens.view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    @property
    def _captures(self) -> bool:
        """Whether CUDA graphs capture the preprocessing."""
        captures: bool = self.cuda_dtoh_point != "before_permutation_1"
        return captures

    @property
    def _rows(self) -> Rows:
        """Rows of the micro-batch under way; a choice that is not known is of permuted tokens."""
        choice = self.micro_batch.choice
        return "permuted tokens" if choice is None else CHAINS[choice.chain].rows

    def _new_micro_batch(self) -> MicroBatch:
        config = self.config
        has_topk = config.moe_expert_capacity_factor is None and not are_patched()
        return MicroBatch(
            choice=self.chooser.choice,
            has_topk=has_topk and not config.moe_router_padding_for_quantization,
        )

    def _enter(
        self, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] and [T, E] -> [N, H] and [N] in expert order; unchanged for a chain of tokens."""
        if self._rows == "tokens":
            if self.config.overlap_moe_expert_parallel_comm:
                # The 1F1B schedule frees what goes into token_dispatch; the router has saved these.
                return tokens.clone(), probs.clone()
            return tokens, probs
        self.hidden_shape_before_permute = tokens.shape
        by_map, num_out_tokens = demands_order(self.config), self.num_out_tokens
        if self.micro_batch.has_topk and not self.drop_and_pad:
            # The same before and after the counts are known.
            num_out_tokens = len(tokens) * self.config.moe_router_topk
        rows, row_probs, permutation, *more = stock.permute(
            tokens,
            self.routing_map,
            probs=probs,
            num_out_tokens=num_out_tokens,
            fused=self.config.moe_permute_fusion,
            drop_and_pad=self.drop_and_pad,
            **({"return_batch_invariant_inverse_map": True} if by_map else {}),
        )
        if by_map:
            self.batch_invariant_inverse_permutation_mapping = more[0]
        self.reversed_local_input_permutation_mapping = permutation
        return rows, row_probs

    def _columns(
        self,
        rows: torch.Tensor,
        probs: torch.Tensor,
        lists: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What the chain carries: [N, H], [N] and no experts; or [T, H], [T, W] and [T, W].

        Args:
            rows, probs: as `_enter` returned them.
            lists: probabilities [T, topk] and experts, where they were made before the counts.
        """
        if self._rows == "permuted tokens":
            return *self._as_counted(rows, probs), None
        width = self.micro_batch.exchanges[0].max_experts_per_token
        if lists is None or lists[1].shape[1] != width:
            lists = self._lists(probs, width)
        return rows, *lists

    def _as_counted(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that the map holds, where top-k of each token were permuted.

        Megatron's permute puts what a map does not hold behind what it holds.

        Raises:
            ValueError: the map holds more.
        """
        num_rows = self.num_out_tokens
        if rows.shape[0] == num_rows:
            return rows, probs
        assert num_rows is not None, "counted"
        if rows.shape[0] < num_rows:
            raise ValueError(
                f"routing_map: holds {num_rows} token-expert pairs, must hold at most the "
                f"{rows.shape[0]} of moe_router_topk experts of each token; where a framework's "
                "maps hold more, it has to replace MoEAlltoAllTokenDispatcher.preprocess, as "
                "stock's alltoall needs too"
            )
        if not self.config.moe_permute_fusion:
            mapping = self.reversed_local_input_permutation_mapping
            assert mapping is not None, "permuted"
            self.reversed_local_input_permutation_mapping = mapping[:num_rows]
        return rows[:num_rows], probs[:num_rows]

    def _lists(self, probs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, E] -> probabilities [T, W] and experts [T, W], ascending."""
        if is_fused(self.options.kernels, probs.device.type):
            from monta_megatron.exchange.kernels.expert_lists import expert_ids_of as of_kernel

            return of_kernel(self.routing_map, probs, width)
        return expert_ids_of(self.routing_map, probs, width)

    def _maybe_dtoh_and_synchronize(self, point: str) -> None:
        """Copy the counts to the host at `cuda_dtoh_point`; use them at `cuda_sync_point`."""
        if point == self.cuda_dtoh_point:
            self._counts.copy_to_host(self.exchange_counts, self.cuda_dtoh_stream)
        if point == self.cuda_sync_point:
            self._bind(self._counts.read())

    def _bind(self, counts: ExchangeCounts) -> None:
        """Bind the choice for this micro-batch, which all ranks share, to its counts."""
        batch, layer = self.micro_batch, None
        if self.moe_layer is not None:
            layer = self.moe_layer()
        is_training = torch.is_grad_enabled() if layer is None else layer.training
        choice = self.chooser.received(counts, is_training, self.probs.device)
        batch.choice = self.choice = choice
        self.busiest_over_mean = counts.busiest_over_mean
        if choice not in self._checked:
            self._check(choice)
        if self._rows == "permuted tokens":
            # Megatron reduces over the expert tensor parallel group in the probabilities' dtype.
            sum_dtype = torch.promote_types(self.probs.dtype, torch.float32)
            batch.exchanges = [self._exchange(counts.permuted_tokens, sum_dtype)]
            self.num_out_tokens = int(batch.exchanges[0].bound.num_source_rows)
        else:
            assert counts.tokens is not None, "counted for chains of tokens"
            width = self.config.moe_router_topk if batch.has_topk else 0
            width = max(width, counts.max_experts_per_token)
            of_chunks = [counts.tokens]
            if choice.splits_experts:
                num_blocks = counts.tokens.tokens.shape[1]
                blocks = blocks_of_chunks(num_blocks, choice.num_chunks)
                of_chunks = [counts.tokens.of_blocks(*block) for block in blocks]
            batch.exchanges = [self._exchange(each, torch.float32, width) for each in of_chunks]
        rows = (exchange.bound.num_expert_rows for exchange in batch.exchanges)
        self._received_rows = int(sum(rows))

    def _exchange(self, counts: ChainCounts, sum_dtype: torch.dtype, width: int = 0) -> Exchange:
        choice = self.micro_batch.choice
        assert choice is not None, "counts are here"
        return Exchange(
            bound=CHAINS[choice.chain].bind(
                self.layout, counts, 1 if choice.splits_experts else choice.num_chunks
            ),
            groups=self.groups,
            sum_dtype=sum_dtype,
            monitor=self.monitor,
            max_experts_per_token=width,
            fused=is_fused(self.options.kernels, self.probs.device.type),
        )

    def _check(self, choice: Choice) -> None:
        """Check a choice before it first carries rows."""
        if self.options.check and self.tp_ep_group.size() > 1:
            from monta_megatron.integration.first_use import FirstUse

            first_use = FirstUse(
                chain=CHAINS[choice.chain],
                num_chunks=choice.num_chunks,
                layout=self.layout,
                group=self.tp_ep_group,
                groups=self.groups,
                hidden_size=self.hidden_shape[-1],
                dtype=self.config.params_dtype,
                prob_dtype=self.probs.dtype,
                topk=self.config.moe_router_topk,
                device=self.probs.device,
                kernels=self.options.kernels,
            )
            first_use.check()
        self._checked.add(choice)

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
            peer_groups(self.planner.chains, self.layout, self._megatron_groups),
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

    def _set_up(self, report: Report) -> tuple[Layout, Planner, FixedChoice]:
        """Layout, planner and choice; raises on all ranks of the exchange, or on none."""
        options, group = self.options, self.tp_ep_group
        nodes, note = nodes_of_exchange(options, group)
        notes = [note]
        layout = Layout(
            ep=self.ep_size,
            etp=self.tp_size,
            num_local_experts=self.num_local_experts,
            rank=dist.get_group_rank(group, dist.get_rank()),
            nodes=nodes,
        )
        # If capacity fixes the counts, none are exchanged; if CUDA graphs capture the permutation,
        # there has to be one. In both cases "auto" may choose only chains of permuted tokens, by
        # the counts of each micro-batch.
        by_counts = self.drop_and_pad or self._captures
        kernels, note = agreed_kernels(options.kernels, device_type(), group)
        notes.append(note)
        self.options = options = replace(options, kernels=kernels)
        planner, rule = agreed_planner(
            options, self.config, layout, by_counts, self._megatron_groups
        )
        if options.overlap_experts and all(each.rows != "tokens" for each in planner.chains):
            notes.append(
                "moe_monta_overlap_experts: no layer is split, as no chain of tokens can run here"
            )
        if planner.fixed is None and (by_counts or not options.tune_steps):
            why = (
                "experts are padded to capacity" if self.drop_and_pad else "moe_monta_tune_steps 0"
            )
            if self._captures:
                why = "CUDA graphs capture the preprocessing"
            elif getattr(self.config, "deterministic_mode", False):
                why = "deterministic mode"
            notes.append(f"auto: no turns, the planner's pick runs: {why}")
        elif planner.fixed is not None:
            notes.append(
                f"{planner.fixed.name}, EP {self.ep_size} x ETP {self.tp_size} over "
                f"{counted(layout.num_nodes, 'node')}: as asked for"
            )
        for each in notes:
            if each is not None:
                report(each)
        chooser = chooser_of(planner, options.tune_steps, by_counts, rule, group, report)
        return layout, planner, chooser

    @property
    def _megatron_groups(self) -> dict[str, dist.ProcessGroup]:
        return {"ep": self.ep_group, "etp": self.tp_group, "tp_ep": self.tp_ep_group}
