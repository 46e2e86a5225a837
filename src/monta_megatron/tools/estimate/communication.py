"""What Megatron's other collectives take: tensor, context and data parallel, pipeline stages.

Collectives are priced as the planner prices them, by the links or curves of the cluster file.
"""

from dataclasses import dataclass

from monta_megatron.chains.program import Resource
from monta_megatron.planner.assumptions import Assumptions
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.experts import VALUE_BYTES, Work
from monta_megatron.planner.flex import memory_rate
from monta_megatron.tools.estimate.architecture import Architecture
from monta_megatron.tools.estimate.settings import TrainingSettings

GRADIENT_BYTES = 4
# Reads and writes of the optimizer per parameter: gradient, master weight and two moments in fp32
# are read, the latter three written, and the weight written in bf16.
OPTIMIZER_BYTES = 4 * 4 + 3 * 4 + 2


def ring_us(cluster: Cluster, num_bytes: float, size: int, stride: int) -> float:
    """An AllGather or ReduceScatter of a group.

    Args:
        cluster: with its costs.
        num_bytes: of the gathered values.
        size: ranks of the group.
        stride: between two of its ranks.
    """
    if size == 1:
        return 0.0
    leaving = num_bytes * (size - 1) / size
    on_node = max(min(cluster.ranks_per_node // stride, size), 1)
    resource: Resource = "intra" if on_node == size else "inter"
    return cluster.time_us("allgather", resource, leaving, size, on_node).us


def tensor_parallel_us(
    model: Architecture, settings: TrainingSettings, cluster: Cluster, num_blocks: int
) -> tuple[float, float]:
    """(forward, backward) of one layer with sequence parallelism.

    Args:
        model, settings, cluster: what is trained.
        num_blocks: attention, and the feed-forward layers that tensor parallelism splits.
    """
    rows = settings.tokens_per_rank * settings.tp * model.hidden_size * VALUE_BYTES
    one = ring_us(cluster, rows, settings.tp, 1)
    # Forward an AllGather and a ReduceScatter; backward the input is gathered once more.
    return 2 * num_blocks * one, 3 * num_blocks * one


def context_parallel_us(
    model: Architecture, settings: TrainingSettings, cluster: Cluster
) -> tuple[float, float]:
    """(forward, backward) of one layer: keys and values go around, then their gradients too."""
    if settings.cp == 1:
        return 0.0, 0.0
    per_token = (
        model.core_attention_values
        if model.is_latent
        else 2 * model.num_query_groups * model.head_dim
    )
    values = settings.tokens_per_rank * settings.cp * per_token * VALUE_BYTES
    one = ring_us(cluster, values, settings.cp, settings.tp)
    return one, 2 * one


def stage_boundary_us(model: Architecture, settings: TrainingSettings, cluster: Cluster) -> float:
    """The hidden rows of a micro-batch from one pipeline stage to the next, one way."""
    if settings.pp == 1:
        return 0.0
    rows = settings.tokens_per_rank * model.hidden_size * VALUE_BYTES
    between_nodes = settings.world_size // settings.pp >= cluster.ranks_per_node
    resource: Resource = "inter" if between_nodes else "intra"
    return cluster.time_us("alltoall", resource, rows, 2, 1).us


@dataclass(frozen=True, kw_only=True)
class StageParameters:
    """Weights that a rank of one pipeline stage holds.

    Attributes:
        of_experts: of its routed experts.
        others: the rest.
    """

    of_experts: float
    others: float


def stage_parameters(model: Architecture, settings: TrainingSettings) -> StageParameters:
    """Those of the mean stage."""
    per_ffn = 3 * model.hidden_size
    num_moe = model.num_layers - model.num_dense_layers
    experts = num_moe * model.num_experts * per_ffn * model.expert_ffn_size
    others = (
        model.num_layers * model.attention_parameters
        + num_moe * (per_ffn * model.shared_ffn_size + model.hidden_size * model.num_experts)
        + model.num_dense_layers * per_ffn * model.dense_ffn_size
        + 2 * model.vocab_size * model.hidden_size
    )
    return StageParameters(
        of_experts=experts / (settings.pp * settings.ep * settings.etp),
        others=others / (settings.pp * settings.tp),
    )


def gradient_us(model: Architecture, settings: TrainingSettings, cluster: Cluster) -> float:
    """ReduceScatter of the gradients and AllGather of the weights (distributed optimizer)."""
    held = stage_parameters(model, settings)
    stage = settings.world_size // settings.pp
    total = 0.0
    for parameters, parts in (
        (held.others, settings.tp),
        (held.of_experts, settings.ep * settings.etp),
    ):
        for value_bytes in (GRADIENT_BYTES, VALUE_BYTES):
            total += ring_us(cluster, parameters * value_bytes, stage // parts, parts)
    return total


def optimizer_us(
    model: Architecture, settings: TrainingSettings, cluster: Cluster, assumed: Assumptions
) -> float:
    """Adam on a rank's share of the master weights."""
    held = stage_parameters(model, settings)
    stage = settings.world_size // settings.pp
    sharded = held.others * settings.tp / stage
    sharded += held.of_experts * settings.ep * settings.etp / stage
    work = Work(kind="memory", num_bytes=OPTIMIZER_BYTES * sharded)
    return work.forward_us(assumed, memory_rate(cluster))
