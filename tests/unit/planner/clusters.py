"""Clusters and shapes that the tests of this folder share."""

from pathlib import Path
from typing import Any

import yaml

from monta_megatron.core import Layout, Routing, Shape
from monta_megatron.planner.cluster import Cluster, HostCosts, Link
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.curves import Rate
from monta_megatron.planner.routing import UniformRouting

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
GOLDEN = Path(__file__).parent / "golden"

# A host that takes no time.
INSTANT = HostCosts(
    collective_us=0.0,
    collective_peer_us=0.0,
    operation_us=0.0,
    counts_to_host_us=0.0,
    counts_us=0.0,
    pass_us=0.0,
    stage_us=0.0,
    source="by hand",
)


def by_hand(name: str) -> Any:
    """The cases of a YAML file of this folder."""
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))


def link(gbytes_per_s: float, start_us: float = 0.0) -> Link:
    """A line by hand."""
    return Link(rate=Rate(gbytes_per_s), start_us=start_us, source="by hand")


def preset(name: str) -> Cluster:
    """A cluster of configs/clusters."""
    return load_cluster(CONFIGS / "clusters" / f"{name}.yaml")


# With PyTorch's operations.
A800, H100, GB200 = (
    preset(name).with_kernels(fused=False)
    for name in ("a800_2x8_ib200", "h100_8x_ndr", "gb200_nvl72")
)


def cluster_of(
    network: Link, node_link: Link, memory: Link, *, ranks: int = 8, nics: int = 8, **fields: Any
) -> Cluster:
    """Two nodes by hand, with PyTorch's operations and an instant host."""
    values = {
        "name": "by hand",
        "source": "by hand",
        "num_nodes": 2,
        "ranks_per_node": ranks,
        "nics_per_node": nics,
        "policy": "streams",
        "network": network,
        "node_link": node_link,
        "memory": memory,
        "host": INSTANT,
    }
    return Cluster(**{**values, **fields})


def layout_of(ep: int, etp: int, ranks_per_node: int, num_experts: int) -> Layout:
    """Consecutive ranks, nodes filled one after the other."""
    return Layout(
        ep=ep,
        etp=etp,
        num_local_experts=num_experts // ep,
        rank=0,
        nodes=tuple(rank // ranks_per_node for rank in range(ep * etp)),
    )


def shape_of(
    ep: int,
    etp: int = 1,
    *,
    ranks_per_node: int = 8,
    num_experts: int = 64,
    topk: int = 8,
    tokens: int = 4096,
    hidden: int = 4096,
    routing: Routing | None = None,
) -> Shape:
    """An exchange in bf16."""
    return Shape(
        layout=layout_of(ep, etp, ranks_per_node, num_experts),
        hidden_size=hidden,
        value_bytes=2,
        prob_bytes=4,
        routing=routing or UniformRouting(num_experts=num_experts, topk=topk),
        tokens_per_rank=tokens,
    )
