"""Set-up of a layer's dispatcher: what lasts for the layer, agreed by the ranks of its exchange."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from monta_megatron.chains.counts import num_counted_blocks
from monta_megatron.common.first_rank import print_once
from monta_megatron.common.nodes import check_named_alike, is_named, node_here
from monta_megatron.common.torch_private import is_usable
from monta_megatron.common.units import counted
from monta_megatron.core import Layout
from monta_megatron.exchange.collectives import PeerGroup, are_open, gather_objects, peer_groups
from monta_megatron.exchange.counts import CountTable
from monta_megatron.exchange.expert_lists import expert_ids_of
from monta_megatron.exchange.kernel_choice import agreed_kernels, device_type, is_fused
from monta_megatron.integration.auto import AutoChoice, Chooser, choice_of, share
from monta_megatron.integration.counts import CapacityCounts, CountExchange
from monta_megatron.integration.options import Options
from monta_megatron.integration.planning import agreed_config, planner_for
from monta_megatron.integration.ranks import (
    check_same_config,
    nodes_of_exchange,
    on_every_exchange,
    reports_for_stage,
)
from monta_megatron.planner.choose import Planner


@dataclass(frozen=True, kw_only=True)
class LayerSetup:
    """Everything about a layer's exchange that lasts as long as the layer.

    Attributes:
        options: of the configuration; the kernels are those that all ranks run.
        layout: this rank's position in the exchange.
        groups: Megatron's "ep", "etp" and "tp_ep".
        planner: proposes choices.
        chooser: makes the choice of each optimizer step.
        counts: source of the counts.
        captures: whether CUDA graphs capture the preprocessing.
        is_fused: whether Triton kernels do the work.
    """

    options: Options
    layout: Layout
    groups: Mapping[str, dist.ProcessGroup]
    planner: Planner
    chooser: Chooser
    counts: CountExchange | CapacityCounts
    captures: bool
    is_fused: bool

    @cached_property
    def list_experts(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Function that lists each token's experts; see `exchange.expert_lists.expert_ids_of`."""
        if self.is_fused:
            # Triton may be missing where no kernel runs.
            from monta_megatron.exchange.kernels.expert_lists import expert_ids_of as of_kernel

            return of_kernel
        return expert_ids_of

    def open_groups(self, before: Mapping[str, PeerGroup]) -> Mapping[str, PeerGroup]:
        """The groups of the chains: `before`, or new ones at first and where any was closed.

        All ranks of the exchange call this.

        Raises:
            ValueError: Megatron's own groups were destroyed.
        """
        if not is_usable(self.groups["tp_ep"]):
            raise ValueError(
                "moe_monta: the process groups that this model was built with were destroyed; "
                "build it again with those of now"
            )
        if before and are_open(before):
            return before
        groups = peer_groups(self.planner.chains, self.layout, dict(self.groups))
        # After the first iterations Megatron changes the time limit of all groups in this list
        # (--distributed-timeout-seconds-after-init), of ours too.
        known = parallel_state._global_process_group_list
        if known is not None:
            ours, closed = (
                [each.process_group for each in made.values()] for made in (groups, before)
            )
            known[:] = [group for group in known if group in ours or group not in closed]
            known += [group for group in ours if group not in known]
        return groups


def set_up_layer(
    config: TransformerConfig,
    num_local_experts: int,
    groups: Mapping[str, dist.ProcessGroup],
    captures: bool,
    pg_collection: ProcessGroupCollection | None,
) -> LayerSetup:
    """Set up the exchange of a layer, together with its other ranks.

    Args:
        config, num_local_experts, pg_collection: as the dispatcher gets them.
        groups, captures: see `LayerSetup`.

    Raises:
        ValueError: the chain cannot run on the layout, or the ranks differ; on all ranks.
    """
    given, group, device = Options.of(config), groups["tp_ep"], device_type()
    ranks = dist.get_process_group_ranks(group)
    reports = reports_for_stage(group, pg_collection)
    # If capacity fixes the counts, none are exchanged; if CUDA graphs capture the permutation, the
    # rows have to be permuted. In both cases "auto" is limited to chains of permuted tokens, and
    # chooses by the counts of each micro-batch.
    by_counts = captures or config.moe_pad_expert_input_to_capacity
    if captures and config.moe_router_padding_for_quantization:
        raise ValueError(
            "moe_router_padding_for_quantization: got True, must be False with CUDA graphs of the "
            "preprocessing: the number of padded rows is known from the counts alone"
        )

    def set_up() -> LayerSetup:
        # Step 1: the ranks of the exchange agree on the options, and share what each knows alone.
        agreed = agreed_config(given, config, groups, permuted_only=by_counts)
        chooser: Chooser | None = choice_of(group, agreed)
        facts = gather_objects((agreed, is_named(), node_here(), chooser is not None), group)
        by_rank, named, hosts, have_chooser = zip(*facts, strict=True)
        check_named_alike(named, ranks)
        check_same_config(by_rank, ranks)

        # Step 2: nodes, kernels and the planner.
        nodes, of_nodes = nodes_of_exchange(given, ranks, hosts)
        kernels, of_kernels = agreed_kernels(given.kernels, device, group)
        options = replace(given, kernels=kernels)
        layout = Layout(
            ep=groups["ep"].size(),
            etp=groups["etp"].size(),
            num_local_experts=num_local_experts,
            rank=dist.get_group_rank(group, dist.get_rank()),
            nodes=nodes,
        )
        planner = planner_for(options, config, layout, permuted_only=by_counts)

        # Step 3: the chooser. A dropped model's may be gone on some ranks only; then all make a
        # new one.
        if planner.fixed is not None:
            chooser = Chooser(planner.fixed, agreed, group)
        elif chooser is None or not all(have_chooser):
            auto = AutoChoice(planner, options.tune_steps, by_counts, agreed, group, reports)
            chooser = share(auto)

        # Step 4: report, one line each.
        lines = [of_nodes, of_kernels]
        if options.overlap_experts and not planner.splits_experts:
            lines.append("moe_monta_overlap_experts: no layer is split: no chain of tokens can run")
        if planner.fixed is not None:
            where = f"EP {layout.ep} x ETP {layout.etp} over {counted(layout.num_nodes, 'node')}"
            lines.append(f"{planner.fixed.name}, {where}: as asked for")
        elif by_counts or not options.tune_steps:
            reason = "deterministic mode" if config.deterministic_mode else "moe_monta_tune_steps 0"
            if by_counts:
                reason = "CUDA graphs of the preprocessing" if captures else "padding to capacity"
            lines.append(f"auto: no turns, the planner's pick runs: {reason}")
        for line in lines:
            if reports and line is not None:
                print_once(line)

        # Step 5: the source of the counts.
        table = CountTable(
            chains=planner.chains,
            layout=layout,
            num_blocks=num_counted_blocks(planner.chains, planner.num_blocks),
            kernels=kernels,
        )
        counts: CountExchange | CapacityCounts = CapacityCounts(count_table=table, config=config)
        if not config.moe_pad_expert_input_to_capacity:
            topk = config.moe_router_topk
            counts = CountExchange(
                count_table=table, topk=topk, group=group, chain_name=options.chain
            )
        return LayerSetup(
            options=options,
            layout=layout,
            groups=groups,
            planner=planner,
            chooser=chooser,
            counts=counts,
            captures=captures,
            is_fused=is_fused(kernels, device),
        )

    # Exchanges of one training measure the same iterations, so their windows have one length.
    steps = {"moe_monta_tune_steps": given.tune_steps}
    return on_every_exchange(set_up, getattr(pg_collection, "expt_dp", None), steps)
