"""The planner of a dispatcher, and the values that all ranks of an expert group have to share."""

import json
import zlib
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from monta_megatron.chains import CHAINS, Chain
from monta_megatron.common import __version__
from monta_megatron.common.errors import UserError
from monta_megatron.core import Layout, Shape
from monta_megatron.exchange.collectives import nccl_settings
from monta_megatron.exchange.kernels import is_fused
from monta_megatron.exchange.launch_order import communicators_overlap
from monta_megatron.exchange.streams import device_type, gpu_name
from monta_megatron.integration.options import OPTION_NAMES, Options
from monta_megatron.planner.choose import Planner
from monta_megatron.planner.plan import NUM_CHUNKS
from monta_megatron.planner.routing import UniformRouting
from monta_megatron.planner.training import auto_problem, chain_problem, phase_of

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

# Fields of a configuration that decide which chains can run, and how large a row is.
AGREED_FIELDS = (
    "hidden_size",
    "moe_latent_size",
    "params_dtype",
    "num_moe_experts",
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_dtype",
    "moe_expert_capacity_factor",
    "batch_invariant_mode",
)
# Layers of one shape share their prices.
_planner = cache(Planner)


def planner_for(
    options: Options, config: "TransformerConfig", layout: Layout, permuted_only: bool
) -> Planner:
    """Planner of a dispatcher with this configuration.

    Args:
        options, config, layout: of this rank, already checked.
        permuted_only: "auto" may choose only chains whose rows are permuted tokens, as where CUDA
            graphs capture the permutation, or padding fixes the counts.

    Raises:
        UserError: the chain cannot run here, or the cluster has too few nodes.
    """
    chain, num_chunks = options.named_chain, options.num_chunks
    check_chain_runs(options, config, layout)
    splits_experts = options.overlap_experts
    if chain is not None:
        assert num_chunks is not None, "a named chain has a number of chunks"
        return Planner(chains=(chain,), num_chunks=(num_chunks,), splits_experts=splits_experts)
    # A named chain needs no costs.
    from monta_megatron.planner.cluster_file import uncalibrated

    cluster = options.cluster or uncalibrated(layout, gpu_name())
    cluster.check_has(layout.num_nodes)
    # Prices depend on both, so all ranks must have the same; results do not.
    cluster = cluster.with_kernels(is_fused(options.kernels, device_type()))
    if not communicators_overlap():
        cluster = cluster.with_links_in_turn()
    chains = tuple(
        each
        for each in CHAINS.values()
        if incompatibility(each, config, layout) is None
        and auto_problem(each, permuted_only) is None
    )
    return _planner(
        chains=chains,
        num_chunks=NUM_CHUNKS if num_chunks is None else (num_chunks,),
        splits_experts=splits_experts and any(each.rows == "tokens" for each in chains),
        phase=phase_of(config),
        shape=shape_of(config, layout),
        cluster=cluster,
    )


def incompatibility(chain: Chain, config: "TransformerConfig", layout: Layout) -> str | None:
    """Why a chain cannot run with a configuration, or None."""
    # Not at the top: it imports Megatron, and Megatron's import imports this file.
    from monta_megatron.integration.count_sources import demands_order

    return chain_problem(chain, config, demands_order(config)) or chain.incompatibility(layout)


def check_chain_runs(options: Options, config: "TransformerConfig", layout: Layout) -> None:
    """Check that the chain named by the options, if any, can run on a layout.

    Raises:
        UserError: it cannot; the message names the option.
    """
    chain = options.named_chain
    if chain is not None and (reason := incompatibility(chain, config, layout)):
        raise UserError(f"moe_monta_chain: {chain.name} cannot run here: {reason}")


def hash_of(values: Mapping[str, Any]) -> int:
    """32 bits of a mapping of plain values, the same in every process."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def agreed_config(
    options: Options,
    config: "TransformerConfig",
    groups: Mapping[str, dist.ProcessGroup],
    permuted_only: bool,
) -> dict[str, Any]:
    """Values that all ranks of an expert group have to share: everything that decides what runs.

    Args:
        options, config, permuted_only: see `planner_for`.
        groups: Megatron's; ours take over their NCCL settings.
    """
    cluster, is_priced = options.cluster, options.named_chain is None
    return {
        "monta_megatron": __version__,
        **{name: getattr(options, name.removeprefix("moe_monta_")) for name in OPTION_NAMES},
        "moe_monta_cluster": None if cluster is None else cluster.name,
        # Costs are too long for a message. Without a cluster file they follow from the GPU.
        "GPU": gpu_name() if is_priced and cluster is None else None,
        "hash of the costs": hash_of({"costs": repr(cluster)}),
        "whether communicators overlap": communicators_overlap() if is_priced else None,
        "permuted_only": permuted_only,
        **{name: str(getattr(config, name, None)) for name in AGREED_FIELDS},
        "passes of an exchange": phase_of(config),
        **{
            f"{setting} of {name} (--nccl-communicator-config-path)": value
            for name, group in groups.items()
            for setting, value in nccl_settings(group).items()
        },
    }


def shape_of(config: "TransformerConfig", layout: Layout) -> Shape:
    """Shape of a layer by its configuration, apart from the number of tokens."""
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
