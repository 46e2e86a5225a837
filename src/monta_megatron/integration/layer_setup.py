"""Set-up of a layer's dispatcher: what lasts for the layer, agreed by its expert group.

The dispatcher's constructor calls `set_up_layer`, in which each of these functions runs inside the
one below it. As each ends, also with an error, its ranks tell each other how (`share_with_group`),
so no rank waits for one that has left:

    read_here   expert group   options and host of each rank; then `agreed_kernels` may gather
    set_up      expert group   the layer's set-up
    in_group    replicas       values that the stage's expert groups have to share
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.utils import get_comm_stream
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from monta_megatron.chains import CHAINS, ChainCounts
from monta_megatron.chains.chain import num_counted_blocks
from monta_megatron.common.errors import UserError
from monta_megatron.common.nodes import node_here
from monta_megatron.common.ranks import print_once
from monta_megatron.common.torch_private import is_open
from monta_megatron.core import Choice, Layout
from monta_megatron.exchange.agreement import share_with_group
from monta_megatron.exchange.collectives import PeerGroup, are_open, peer_groups
from monta_megatron.exchange.count_messages import CountMessages, MicroBatchCounts
from monta_megatron.exchange.errors import naming_failure
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.kernels import agreed_kernels, is_fused, kernel_problem
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.pipeline import blocks_of_chunks
from monta_megatron.exchange.streams import device_type, side_streams
from monta_megatron.integration.auto import AutoChooser, Chooser, find_chooser, register_chooser
from monta_megatron.integration.count_sources import CountsFromRanks, replaces_preprocess
from monta_megatron.integration.options import Options
from monta_megatron.integration.planning import agreed_config, planner_for
from monta_megatron.integration.ranks import (
    check_same_config,
    nodes_of_ranks,
    reports_for_stage,
)
from monta_megatron.integration.supported_settings import check_supported
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
        report: prints a line once, on the first rank of the pipeline stage.
    """

    config: TransformerConfig
    options: Options
    layout: Layout
    groups: Mapping[str, dist.ProcessGroup]
    planner: Planner
    chooser: Chooser
    captures: bool
    is_fused: bool
    report: Callable[[str], None]

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

    def bind(
        self,
        choice: Choice,
        counts: MicroBatchCounts,
        *,
        groups: Mapping[str, PeerGroup],
        prob_dtype: torch.dtype,
        monitor: Monitor,
        least_width: int = 0,
    ) -> tuple[Exchange, ...]:
        """Bind a choice to the counts of a micro-batch; one exchange, or one per split chunk.

        `groups` are those of `open_groups`; W, of `Exchange`, is at least `least_width`.
        """
        chain, num_chunks, width = CHAINS[choice.chain], choice.num_chunks, 0
        sum_dtype = torch.float32
        if chain.rows == "permuted tokens":
            parts: list[ChainCounts] = [counts.permuted_tokens]
            # Megatron reduces over the expert tensor parallel group in the probabilities' dtype.
            sum_dtype = torch.promote_types(prob_dtype, torch.float32)
        else:
            assert counts.tokens is not None, "counted for chains of tokens"
            width, parts = max(least_width, counts.max_experts_per_token), [counts.tokens]
            if choice.splits_experts:
                blocks = blocks_of_chunks(counts.tokens.tokens.shape[1], num_chunks)
                parts, num_chunks = [counts.tokens.of_blocks(*each) for each in blocks], 1
        return tuple(
            Exchange(
                bound_chain=chain.bind(self.layout, each, num_chunks),
                groups=groups,
                sum_dtype=sum_dtype,
                monitor=monitor,
                max_experts_per_token=width,
                fused=self.is_fused,
            )
            for each in parts
        )

    def notes(self) -> Iterator[str]:
        """Lines for the log: experts that are not split, a given choice, why nothing is tuned."""
        if self.options.overlap_experts and not self.planner.splits_experts:
            yield "moe_monta_overlap_experts: no layer is split: no chain of tokens can run"
        if replaces_preprocess():
            yield "a framework has replaced Megatron's preprocess: rows are permuted as counted"
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
        with naming_failure("creation of rail and node groups", self.groups["tp_ep"]):
            groups = peer_groups(self.planner.chains, self.layout, dict(self.groups))
        # After the first iterations Megatron changes the time limit of all groups in this list
        # (--distributed-timeout-seconds-after-init), of ours too.
        megatrons = parallel_state._global_process_group_list
        if megatrons is not None:
            ours, old = ([each.process_group for each in by.values()] for by in (groups, before))
            megatrons[:] = [group for group in megatrons if group in ours or group not in old]
            megatrons += [group for group in ours if group not in megatrons]
        return groups


@cache
def streams_line(device: torch.device) -> str:
    """Handles of our streams and Megatron's, with those that are shared; the same in later calls.

    torch hands out the streams of a pool in turn, so one of ours may also be one of Megatron's.
    Results do not change, but work on it waits unnecessarily.
    """
    megatrons = {
        "copies of counts": MoEAlltoAllTokenDispatcher.cuda_dtoh_stream,
        "shared experts": SharedExpertMLP.stream,
        "1F1B communication": get_comm_stream(),
    }
    side = [stream.cuda_stream for stream in side_streams(device)]
    parts = [
        f"caller {torch.cuda.current_stream(device).cuda_stream:#x}",
        f"ours {' '.join(f'{handle:#x}' for handle in side)}",
    ]
    shared = []
    for name, stream in megatrons.items():
        # Megatron makes them where it needs them.
        if stream is not None:
            parts.append(f"{name} {stream.cuda_stream:#x}")
            if stream.cuda_stream in side:
                shared.append(name)
    return f"streams: {', '.join(parts)}; shared with ours: {', '.join(shared) or 'none'}"


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
        UserError: the chain cannot run on the layout, or the ranks differ.
        Exception: as `share_with_group`; any of these on all ranks of the stage's expert groups.
    """
    group, device = groups["tp_ep"], device_type()
    ranks = dist.get_process_group_ranks(group)
    report = print_once if reports_for_stage(group, pg_collection) else lambda line: None
    # Capacity fixes the counts, and none are exchanged; or the rows are permuted in a CUDA graph.
    permuted_only = captures or config.moe_pad_expert_input_to_capacity
    # Where the nodes are taken from, which all ranks have to know alike.
    named = {"whether MONTA_NODE is set": bool(os.environ.get("MONTA_NODE"))}

    def read_here() -> tuple[Any, tuple[dict[str, Any], str, bool]]:
        """This rank's options and chooser; what it agrees on, its host, if layers share one."""
        check_supported(config)
        given = Options.of(config)
        if captures and config.moe_router_padding_for_quantization:
            raise UserError(
                "moe_router_padding_for_quantization: got True, must be False with CUDA graphs of "
                "the preprocessing: the number of padded rows is known from the counts alone"
            )
        if given.kernels != "torch":
            # The first use, which may fail; `agreed_kernels` gathers the answer.
            kernel_problem(device)
        agreed = agreed_config(given, config, groups, permuted_only) | named
        chooser = find_chooser(group, agreed)
        return (given, chooser), (agreed, node_here(), chooser is not None)

    def set_up() -> tuple[LayerSetup, None]:
        (given, chooser), facts = share_with_group(read_here, group)
        by_rank, hosts, have_chooser = zip(*facts, strict=True)
        check_same_config(by_rank, ranks)
        kernels, kernels_note = agreed_kernels(given.kernels, device, group)
        nodes, nodes_note = nodes_of_ranks(given, ranks, hosts)
        options = replace(given, kernels=kernels)
        layout = Layout(
            ep=groups["ep"].size(),
            etp=groups["etp"].size(),
            num_local_experts=num_local_experts,
            rank=ranks.index(dist.get_rank()),
            nodes=nodes,
        )
        planner = planner_for(options, config, layout, permuted_only)
        if planner.fixed is not None:
            chooser = Chooser(planner.fixed, by_rank[0], group)
        elif not all(have_chooser):
            # A rank may have collected a dropped model. A named chain needs no tuner.
            from monta_megatron.planner.tuning import Tuner

            tuner = Tuner(planner=planner, num_steps=options.tune_steps, report=report)
            chooser = register_chooser(AutoChooser(tuner, permuted_only, by_rank[0], group))
        setup = LayerSetup(
            config=config,
            options=options,
            layout=layout,
            groups=groups,
            planner=planner,
            chooser=chooser,
            captures=captures,
            is_fused=is_fused(kernels, device),
            report=report,
        )
        for note in (nodes_note, kernels_note, *setup.notes()):
            if note is not None:
                report(note)
        return setup, None

    def in_group() -> tuple[LayerSetup, dict[str, Any]]:
        setup, _ = share_with_group(set_up, group)
        # Exchanges of one training measure the same iterations, so their windows have one length.
        return setup, {"moe_monta_tune_steps": setup.options.tune_steps} | named

    # The ranks with this rank's position in the stage's expert groups, where they are known.
    replicas = getattr(pg_collection, "expt_dp", None)
    if replicas is None:
        return in_group()[0]
    setup, by_group = share_with_group(in_group, replicas, "expt_dp", "in the expert group of rank")
    check_same_config(by_group, dist.get_process_group_ranks(replicas))
    return setup
