"""A GPU and a cluster with round numbers, so that times can be worked out by hand."""

from monta_megatron.common.units import Rate
from monta_megatron.planner.assumptions import Assumptions, assumptions_of
from monta_megatron.planner.cluster import Cluster, HostCosts, Link
from monta_megatron.tools.estimate.layers import Architecture

# 1e9 FLOPs per us, 1e7 bytes per us of memory, all of them reached; no host.
ROUND = {
    "peak_tflops": 1000,
    "gemm_efficiency": 1,
    "attention_efficiency": 1,
    "memory_efficiency": 1,
    "attention_row_passes": 12,
    "feed_forward_row_passes": 6,
    "activation_passes": 3,
    "router_passes": 20,
    "loss_passes": 5,
    "host_layer_us": 0,
    "host_serial": 0.5,
    "host_platform_ratio": 1,
    "host_dense_share": 0.5,
    "host_latent_ratio": 2,
    "host_graph_ratio": 0.25,
    "host_forward_share": 0.4,
    "overlap_share": 0.5,
    "selective_recompute_share": 0.1,
    "gradient_exposed": 0.5,
    "stage_boundary_exposed": 1,
}
MEMORY_GBYTES_PER_S = 10_000


def assumed(**changes: float) -> Assumptions:
    """The round numbers, some of them changed."""
    return assumptions_of("H100", "toy", {**ROUND, **changes})


def toy_cluster(num_nodes: int = 2, ranks_per_node: int = 4) -> Cluster:
    """100 GB/s between GPUs of a node, 10 GB/s of network for each: 1e5 and 1e4 bytes per us."""
    rates = {"inter": 10.0, "intra": 100.0, "memory": float(MEMORY_GBYTES_PER_S)}
    return Cluster(
        name="toy",
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        nics_per_node=ranks_per_node,
        kind="datasheet",
        source="a test",
        launch=HostCosts(
            collective_us=0,
            copy_us=0,
            sum_us=0,
            find_us=0,
            counts_to_host_us=0,
            kind="datasheet",
            source="a test",
        ),
        links=tuple(
            Link(resource=name, alpha_us=0, rate=Rate(rate), kind="datasheet", source="a test")
            for name, rate in rates.items()
        ),
    )


# Grouped-query attention: 10 heads of 100 values, 2 groups; 8 experts of 500, 2 for a token.
TOY = Architecture(
    num_layers=2,
    hidden_size=1000,
    num_attention_heads=10,
    num_query_groups=2,
    head_dim=100,
    num_experts=8,
    router_topk=2,
    expert_ffn_size=500,
    dense_ffn_size=4000,
    vocab_size=10_000,
)
