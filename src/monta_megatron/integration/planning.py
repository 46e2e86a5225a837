"""The planner of a dispatcher, from its configuration, alike on all ranks of an exchange."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from monta_megatron.chains import Chain
from monta_megatron.common.units import counted
from monta_megatron.core import Layout, Shape
from monta_megatron.exchange.collectives import nccl_settings
from monta_megatron.exchange.kernel_choice import device_type, is_fused
from monta_megatron.integration.options import Options
from monta_megatron.integration.ranks import agree
from monta_megatron.planner.choose import Planner, chains_for
from monta_megatron.planner.routing.expected import UniformRouting


def planner_for(options: Options, config: Any, layout: Layout, permuted_only: bool) -> Planner:
    """Planner of a dispatcher with this configuration.

    Args:
        options: the options, already checked.
        config: the TransformerConfig.
        layout: this rank's position.
        permuted_only: "auto" may choose only chains whose rows are permuted tokens.

    Raises:
        ValueError: the chain cannot run here, or the cluster has too few nodes.
    """
    chain, num_chunks = options.named_chain, options.num_chunks
    check_chain_runs(options, config, layout)
    splits_experts = bool(options.overlap_experts)
    if chain is not None:
        assert num_chunks is not None, "a named chain has a number of chunks"
        return Planner(chains=(chain,), num_chunks=(num_chunks,), splits_experts=splits_experts)
    from monta_megatron.planner.select import NUM_CHUNKS

    cluster = options.cluster
    if cluster is None:
        from monta_megatron.exchange.streams import gpu_name
        from monta_megatron.planner.cluster_file import uncalibrated

        cluster = uncalibrated(layout, gpu_name())
    if layout.num_nodes > cluster.num_nodes:
        raise ValueError(
            f"moe_monta_cluster: {cluster.name} has {counted(cluster.num_nodes, 'node')}, must "
            f"have at least the {layout.num_nodes} of the exchange; num_nodes in the file is that "
            "of the cluster, not of the calibration"
        )
    chains = tuple(
        each
        for each in chains_for(layout)
        if each.rows == "permuted tokens"
        or not (permuted_only or _adds_in_other_order(each, config))
    )
    return Planner(
        chains=chains,
        num_chunks=NUM_CHUNKS if num_chunks is None else (num_chunks,),
        splits_experts=splits_experts and any(each.rows == "tokens" for each in chains),
        shape=shape_of(config, layout, options),
        # Priced as they run, so ranks have to agree on the kernels here; the bits are alike.
        cluster=cluster.with_kernels(is_fused(options.kernels, device_type())),
    )


def _adds_in_other_order(chain: Chain, config: Any) -> str | None:
    """Why a chain cannot run in batch-invariant mode; None if it can, or in another mode.

    Megatron's unpermute adds by EP rank, then by expert, in fp32, and rounds once.
    """
    if chain.rows == "permuted tokens" or not getattr(config, "batch_invariant_mode", False):
        return None
    # Imports Megatron, which may be importing us.
    from monta_megatron.integration.counts import demands_order

    if not demands_order(config):
        return None
    return (
        "batch_invariant_mode wants the rows of a token added by EP rank, then by expert, and "
        "rounded once; alltoall and alltoall_allgather do so"
    )


def _is_padded(chain: Chain, config: Any) -> str | None:
    """Why a chain cannot run with experts padded to capacity; None if it can, or without."""
    if chain.rows == "permuted tokens" or not getattr(
        config, "moe_pad_expert_input_to_capacity", False
    ):
        return None
    return (
        "its rows are tokens, and moe_pad_expert_input_to_capacity pads permuted tokens; take "
        "auto, alltoall or alltoall_allgather, or leave the padding out"
    )


def check_chain_runs(options: Options, config: Any, layout: Layout) -> None:
    """Check that the chain that the options name, if they do, can run on a layout.

    Raises:
        ValueError: it cannot; the message names the option.
    """
    chain = options.named_chain
    reason = None
    if chain is not None:
        reason = (
            chain.incompatibility(layout)
            or _is_padded(chain, config)
            or _adds_in_other_order(chain, config)
        )
    if chain is not None and reason is not None:
        raise ValueError(f"moe_monta_chain: {chain.name} cannot run here: {reason}")


def agreed_planner(
    options: Options,
    config: Any,
    layout: Layout,
    permuted_only: bool,
    groups: Mapping[str, dist.ProcessGroup],
) -> tuple[Planner, dict[str, Any]]:
    """Planner of all ranks of an exchange, and the agreed configuration.

    Args:
        options, config, layout, permuted_only: see `planner_for`.
        groups: Megatron's; all ranks of "tp_ep" call this.

    Raises:
        ValueError: the chain cannot run here, or the ranks differ; on all of them.
    """
    try:
        planner = planner_for(options, config, layout, permuted_only)
        problem = None
        rule = agreed_config_of(planner, config, layout, options) | _settings_of(groups)
    except ValueError as error:
        problem, rule = error, {"chain": options.chain, "problem": str(error)}
    agree(rule, groups["tp_ep"])
    if problem is not None:
        raise problem
    return planner, rule


def agreed_config_of(
    planner: Planner, config: Any, layout: Layout, options: Options
) -> dict[str, Any]:
    """Configuration that all ranks of an exchange agree on: choice and format of rows."""
    shape = shape_of(config, layout, options)
    return {
        **planner.agreed_config(),
        "moe_monta_tune_steps": options.tune_steps,
        "moe_monta_check": options.check,
        "hidden_size": shape.hidden_size,
        "num_moe_experts": config.num_moe_experts,
        "moe_router_topk": config.moe_router_topk,
        "moe_router_num_groups": config.moe_router_num_groups,
        "moe_router_group_topk": config.moe_router_group_topk,
        "value_bytes": shape.value_bytes,
        "prob_bytes": shape.prob_bytes,
    }


def _settings_of(groups: Mapping[str, dist.ProcessGroup]) -> dict[str, Any]:
    """Settings of Megatron's communicators: ours are made alike, and named by them."""
    return {
        f"{setting} of {name} (--nccl-communicator-config-path)": value
        for name, group in groups.items()
        for setting, value in nccl_settings(group).items()
    }


def shape_of(config: Any, layout: Layout, options: Options) -> Shape:
    """Shape of a layer by its configuration, all but the number of tokens."""
    value_bytes = torch.empty(0, dtype=config.params_dtype).element_size()
    router_dtype = getattr(config, "moe_router_dtype", None)
    return Shape(
        layout=layout,
        hidden_size=getattr(config, "moe_latent_size", None) or config.hidden_size,
        value_bytes=value_bytes,
        prob_bytes={"fp32": 4, "fp64": 8}.get(str(router_dtype), value_bytes),
        routing=UniformRouting(
            num_experts=config.num_moe_experts,
            topk=config.moe_router_topk,
            num_groups=config.moe_router_num_groups or 1,
            group_topk=config.moe_router_group_topk or 1,
        ),
        tokens_per_rank=1,
    )
