"""Set-up of a layer's dispatcher: what lasts for the layer, agreed by its expert group."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from monta_megatron.chains.chain import num_counted_blocks
from monta_megatron.common.errors import UserError
from monta_megatron.common.nodes import node_here
from monta_megatron.common.ranks import print_once
from monta_megatron.common.torch_private import is_open
from monta_megatron.core import Layout
from monta_megatron.exchange.collectives import PeerGroup, are_open, gather_objects, peer_groups
from monta_megatron.exchange.count_messages import CountMessages
from monta_megatron.exchange.kernels import agreed_kernels, is_fused
from monta_megatron.exchange.streams import device_type
from monta_megatron.integration.auto import AutoChooser, Chooser, share_chooser, shared_chooser
from monta_megatron.integration.count_sources import CountsFromRanks
from monta_megatron.integration.options import Options
from monta_megatron.integration.planning import agreed_config, planner_for
from monta_megatron.integration.ranks import (
    check_same_config,
    nodes_of_ranks,
    on_every_expert_group,
    reports_for_stage,
)
from monta_megatron.planner.choose import Planner


@dataclass(frozen=True, kw_only=True)
class LayerSetup:
    """Everything about a layer's exchange that lasts as long as the layer.

    Attributes:
        config: of the layer.
        options: of the configuration; the kernels are those that all ranks run.
        layout: this rank's position in the exchange.
        groups: Megatron's "ep", "etp" and "tp_ep".
        planner: proposes choices.
        chooser: makes the choice of each optimizer step.
        captures: whether CUDA graphs capture the preprocessing.
        is_fused: whether Triton kernels do the work.
    """

    config: TransformerConfig
    options: Options
    layout: Layout
    groups: Mapping[str, dist.ProcessGroup]
    planner: Planner
    chooser: Chooser
    captures: bool
    is_fused: bool

    @cached_property
    def counts(self) -> CountsFromRanks:
        """Source of the counts, where capacity does not fix them."""
        planner = self.planner
        messages = CountMessages(
            chains=planner.chains,
            layout=self.layout,
            num_blocks=num_counted_blocks(planner.chains, planner.num_blocks),
            kernels=self.options.kernels,
        )
        return CountsFromRanks(
            count_messages=messages, group=self.groups["tp_ep"], chain_name=self.options.chain
        )

    def notes(self) -> Iterator[str]:
        """Lines for the log: experts that are not split, a given choice, why nothing is tuned."""
        if self.options.overlap_experts and not self.planner.splits_experts:
            yield "moe_monta_overlap_experts: no layer is split: no chain of tokens can run"
        reasons = {
            "CUDA graphs of the preprocessing": self.captures,
            "padding to capacity": self.config.moe_pad_expert_input_to_capacity,
            "deterministic mode": self.config.deterministic_mode,
            "moe_monta_tune_steps 0": not self.options.tune_steps,
        }
        if self.planner.fixed is not None:
            yield f"{self.planner.fixed.name}, {self.layout.name}: as asked for"
        elif reason := next((reason for reason, holds in reasons.items() if holds), None):
            yield f"auto: no tuning, the planner's pick runs: {reason}"

    def open_groups(self, before: Mapping[str, PeerGroup]) -> Mapping[str, PeerGroup]:
        """The groups of the chains: `before`, or new ones at first and where any was closed.

        All ranks of the expert group call this.

        Raises:
            UserError: Megatron's own groups were destroyed.
        """
        if not is_open(self.groups["tp_ep"]):
            raise UserError(
                "moe_monta: the process groups that this model was built with were destroyed; "
                "build it again with those of now"
            )
        if before and are_open(before):
            return before
        groups = peer_groups(self.planner.chains, self.layout, dict(self.groups))
        # After the first iterations Megatron changes the time limit of all groups in this list
        # (--distributed-timeout-seconds-after-init), of ours too.
        megatrons = parallel_state._global_process_group_list
        if megatrons is not None:
            ours, old = ([each.process_group for each in by.values()] for by in (groups, before))
            megatrons[:] = [group for group in megatrons if group in ours or group not in old]
            megatrons += [group for group in ours if group not in megatrons]
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
        UserError: the chain cannot run on the layout, or the ranks differ; on all ranks.
    """
    given, group, device = Options.of(config), groups["tp_ep"], device_type()
    report = print_once if reports_for_stage(group, pg_collection) else lambda line: None
    # Capacity fixes the counts, and none are exchanged; or the rows are permuted in a CUDA graph.
    permuted_only = captures or config.moe_pad_expert_input_to_capacity
    if captures and config.moe_router_padding_for_quantization:
        raise UserError(
            "moe_router_padding_for_quantization: got True, must be False with CUDA graphs of the "
            "preprocessing: the number of padded rows is known from the counts alone"
        )

    # Where the nodes are taken from, which all ranks have to know alike.
    named = {"whether MONTA_NODE is set": bool(os.environ.get("MONTA_NODE"))}

    def set_up() -> LayerSetup:
        agreed = agreed_config(given, config, groups, permuted_only) | named
        hosts, chooser = _agree_in_group(agreed, group)
        nodes, nodes_note = nodes_of_ranks(given, dist.get_process_group_ranks(group), hosts)
        kernels, kernels_note = agreed_kernels(given.kernels, device, group)
        options = replace(given, kernels=kernels)
        layout = Layout(
            ep=groups["ep"].size(),
            etp=groups["etp"].size(),
            num_local_experts=num_local_experts,
            rank=dist.get_group_rank(group, dist.get_rank()),
            nodes=nodes,
        )
        planner = planner_for(options, config, layout, permuted_only)
        if planner.fixed is not None:
            chooser = Chooser(planner.fixed, agreed, group)
        elif chooser is None:
            # A named chain needs no tuner.
            from monta_megatron.planner.tuning import Tuner

            tuner = Tuner(planner=planner, num_steps=options.tune_steps, report=report)
            chooser = share_chooser(AutoChooser(tuner, permuted_only, agreed, group))
        setup = LayerSetup(
            config=config,
            options=options,
            layout=layout,
            groups=groups,
            planner=planner,
            chooser=chooser,
            captures=captures,
            is_fused=is_fused(kernels, device),
        )
        for note in (nodes_note, kernels_note, *setup.notes()):
            if note is not None:
                report(note)
        return setup

    # Exchanges of one training measure the same iterations, so their windows have one length.
    steps = {"moe_monta_tune_steps": given.tune_steps}
    return on_every_expert_group(set_up, getattr(pg_collection, "expt_dp", None), steps | named)


def _agree_in_group(
    agreed: dict[str, Any], group: dist.ProcessGroup
) -> tuple[Sequence[str], Chooser | None]:
    """Check that all ranks of the expert group share the agreed values; one gather.

    Returns:
        Each rank's host (or MONTA_NODE), and the chooser that this layer shares; None if a rank has
        none, for instance because it has collected a dropped model.
    """
    chooser, ranks = shared_chooser(group, agreed), dist.get_process_group_ranks(group)
    facts = gather_objects((agreed, node_here(), chooser is not None), group)
    by_rank, hosts, have_chooser = zip(*facts, strict=True)
    check_same_config(by_rank, ranks)
    return hosts, chooser if all(have_chooser) else None
