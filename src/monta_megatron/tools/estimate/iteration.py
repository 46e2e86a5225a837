"""The time of a training iteration, by part, Megatron's other collectives included.

The parts are those of the mean pipeline stage. The slowest stage sets the pace, once for every
micro-batch; the waits of the first and the last micro-batch are the bubble. In a stage the parts of
its layers run one after the other. The host starts the kernels of a layer while the GPU runs
earlier ones; where it takes longer than the GPU, the GPU waits, and some of the shorter of the two
times always shows, as the host waits for counts. Collectives are priced as the planner prices them,
by the links or curves of the cluster file. All of it is predicted; nothing was measured.
"""

import math
from dataclasses import dataclass

from monta_megatron.chains.program import Resource
from monta_megatron.planner.assumptions import Assumptions
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.experts import VALUE_BYTES, Work, times_us
from monta_megatron.planner.flex import memory_rate
from monta_megatron.tools.estimate import layers
from monta_megatron.tools.estimate.exchange import ExchangeTime, exchange_time
from monta_megatron.tools.estimate.layers import Architecture, TrainingSettings

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
        model, settings, cluster: the trained model.
        num_blocks: attention, and the feed-forward layers that tensor parallelism splits.
    """
    rows = settings.tokens_per_rank * settings.tp * model.hidden_size * settings.value_bytes
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
    values = settings.tokens_per_rank * settings.cp * per_token * settings.value_bytes
    one = ring_us(cluster, values, settings.cp, settings.tp)
    return one, 2 * one


def stage_boundary_us(model: Architecture, settings: TrainingSettings, cluster: Cluster) -> float:
    """The hidden rows of a micro-batch from one pipeline stage to the next, one way."""
    if settings.pp == 1:
        return 0.0
    rows = settings.tokens_per_rank * model.hidden_size * settings.value_bytes
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
    """Parameters of the mean stage."""
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
        for value_bytes in (GRADIENT_BYTES, settings.value_bytes):
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


EXCHANGE, HIDDEN = "exchange, exposed", "exchange, hidden"
HOST = "waiting for the host"
BUBBLE = "pipeline bubble"
UNEVEN = "uneven stages"


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One iteration.

    Attributes:
        parts_ms: part -> its time; `HIDDEN` is in no sum.
        model_flops: of the iteration, as Megatron counts them.
        num_ranks: that share them.
        num_tokens: of the global batch.
    """

    parts_ms: dict[str, float]
    model_flops: float
    num_ranks: int
    num_tokens: int

    @property
    def total_ms(self) -> float:
        """All that is not hidden."""
        return sum(time for part, time in self.parts_ms.items() if part != HIDDEN)

    @property
    def tflops_per_gpu(self) -> float:
        """Megatron's TFLOP/s per GPU."""
        return self.model_flops / self.num_ranks / self.total_ms / 1e9

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens of the batch."""
        return self.num_tokens / self.num_ranks / self.total_ms * 1e3


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """One layer and micro-batch, forward and backward, in us.

    Attributes:
        parts: part -> time; with `EXCHANGE` and `HIDDEN` in MoE layers.
        forward: what of it, without the exchange, is forward.
    """

    parts: dict[str, float]
    forward: float

    @property
    def total(self) -> float:
        """All that is not hidden."""
        return sum(time for part, time in self.parts.items() if part != HIDDEN)

    @property
    def gpu_us(self) -> float:
        """Likewise, with a host that is always ahead."""
        return self.total - self.parts[HOST]


def estimate_iteration(
    model: Architecture,
    settings: TrainingSettings,
    cluster: Cluster,
    assumed: Assumptions,
    exchange: ExchangeTime | None = None,
    experts_pipelined: bool = False,
) -> Iteration:
    """Predict an iteration.

    Args:
        model: the trained model.
        settings: how.
        cluster: where.
        assumed: the constants for its GPU.
        exchange: of one MoE layer and micro-batch; None for the dispatcher of the settings.
        experts_pipelined: whether experts run beside their own exchange, chunk by chunk.
    """
    if exchange is None:
        exchange = exchange_time(model, settings, cluster, assumed)

    # Step 1: a layer of each kind, and what ends of the model add to a stage.
    moe = moe_layer(model, settings, cluster, assumed, exchange, experts_pipelined)
    dense = dense_layer(model, settings, cluster, assumed)
    ends = sum(
        times_us(
            layers.embedding_and_loss(model, settings, assumed),
            assumed,
            _memory_rate(settings, cluster),
        )
    )

    # Step 2: the mean stage, and the slowest, which sets the pace.
    num_dense = model.num_dense_layers
    num_moe = model.num_layers + model.mtp_layers - num_dense
    stage: dict[str, float] = {}
    for layer, times in ((moe, num_moe), (dense, num_dense)):
        for part, time_us in layer.parts.items():
            stage[part] = stage.get(part, 0.0) + times * time_us / settings.pp
    stage["embedding and loss"] = ends / settings.pp
    mean = sum(time_us for part, time_us in stage.items() if part != HIDDEN)
    if settings.pp > 1:
        most, last = _layers_of_stages(num_moe + num_dense, settings)
        stage[UNEVEN] = max(most * moe.total, last * moe.total + ends) - mean
        boundary = stage_boundary_us(model, settings, cluster)
        shown = assumed["stage_boundary_exposed"] * boundary
        stage["pipeline communication"] = 2 * settings.virtual_stages * shown

    # Step 3: all micro-batches, the bubble, and what follows them.
    num = settings.num_micro_batches
    parts_us = {part: num * time_us for part, time_us in stage.items()}
    parts_us[BUBBLE] = (settings.pp - 1) / settings.virtual_stages * mean
    gradient = gradient_us(model, settings, cluster)
    exposed = assumed["gradient_exposed"] if settings.overlap_gradients else 1.0
    parts_us["gradient reduction"] = gradient * exposed
    parts_us["optimizer"] = optimizer_us(model, settings, cluster, assumed)
    num_tokens = settings.global_batch_size * settings.seq_length
    return Iteration(
        parts_ms={part: time_us / 1e3 for part, time_us in parts_us.items()},
        model_flops=num_tokens * model.model_flops_per_token(settings.seq_length),
        num_ranks=settings.world_size,
        num_tokens=num_tokens,
    )


def _layers_of_stages(num_layers: int, settings: TrainingSettings) -> tuple[int, int]:
    """Layers of the stage with the most, and of the last, which has the loss too."""
    last = settings.last_stage_layers
    if last is None:
        return math.ceil(num_layers / settings.pp), num_layers // settings.pp
    return math.ceil((num_layers - last) / (settings.pp - 1)), last


def _memory_rate(settings: TrainingSettings, cluster: Cluster) -> float:
    """Rate for work that is counted in 16-bit values, in GB/s."""
    return memory_rate(cluster) * VALUE_BYTES / settings.value_bytes


def moe_layer(
    model: Architecture,
    settings: TrainingSettings,
    cluster: Cluster,
    assumed: Assumptions,
    exchange: ExchangeTime,
    experts_pipelined: bool = False,
) -> LayerTime:
    """A layer with experts."""
    works = {
        model.attention_name: layers.attention(model, settings, assumed),
        "router": layers.router(model, settings, assumed),
        "experts": layers.experts(model, settings, assumed),
    }
    if model.shared_ffn_size:
        shared = layers.feed_forward(model, settings, model.shared_ffn_size, assumed)
        works["shared experts"] = shared
    blocks = 2 if model.shared_ffn_size else 1
    times, forward = _times(model, settings, cluster, assumed, works, blocks)
    return _with_host(
        model, settings, assumed, times, forward, exchange, experts_pipelined=experts_pipelined
    )


def dense_layer(
    model: Architecture, settings: TrainingSettings, cluster: Cluster, assumed: Assumptions
) -> LayerTime:
    """A layer without."""
    works = {
        model.attention_name: layers.attention(model, settings, assumed),
        "dense": layers.feed_forward(model, settings, model.dense_ffn_size, assumed),
    }
    times, forward = _times(model, settings, cluster, assumed, works, 2)
    return _with_host(model, settings, assumed, times, forward, None)


def _times(
    model: Architecture,
    settings: TrainingSettings,
    cluster: Cluster,
    assumed: Assumptions,
    works: dict[str, tuple[layers.Work, ...]],
    num_blocks: int,
) -> tuple[dict[str, float], float]:
    """Part -> us of a layer, forward and backward, and the forward part of all."""
    times, forward = {}, 0.0
    memory = _memory_rate(settings, cluster)
    for part, of_part in works.items():
        there, back = times_us(of_part, assumed, memory)
        times[part], forward = there + back, forward + there
    for part, (there, back) in {
        "TP communication": tensor_parallel_us(model, settings, cluster, num_blocks),
        "CP communication": context_parallel_us(model, settings, cluster),
    }.items():
        if there + back > 0:
            times[part], forward = there + back, forward + there
    return times, forward


def _with_host(
    model: Architecture,
    settings: TrainingSettings,
    assumed: Assumptions,
    times: dict[str, float],
    forward: float,
    exchange: ExchangeTime | None,
    experts_pipelined: bool = False,
) -> LayerTime:
    """A layer with its exchange, its recomputed parts, and the exposed host time."""
    parts = dict(times)

    # Step 1: the exchange, and what of it other work hides.
    if exchange is not None:
        took, hidden = exchange.forward_us + exchange.backward_us, 0.0
        if experts_pipelined:
            # All chunks but one run beside the other resource's.
            hidden = (1 - 1 / exchange.num_chunks) * min(took, times["experts"])
        if settings.overlap:
            hidden = max(hidden, assumed["overlap_share"] * min(took, sum(times.values())))
        # A recomputed exchange has no other micro-batch beside it.
        again_us = exchange.forward_us if settings.recompute == "full" else 0.0
        parts[EXCHANGE], parts[HIDDEN] = took - hidden + again_us, hidden

    # Step 2: recompute.
    again = {"none": 0.0, "selective": assumed["selective_recompute_share"], "full": 1.0}
    if settings.recompute != "none":
        parts["recompute"] = again[settings.recompute] * forward

    # Step 3: the host.
    gpu_us = sum(time for part, time in parts.items() if part != HIDDEN)
    host_us = _host_us(model, settings, assumed)
    if exchange is None:
        host_us *= assumed["host_dense_share"]
    shorter, longer = sorted((gpu_us, host_us))
    # Where two micro-batches take turns, the GPU has the other one's kernels while the host waits.
    serial = 0.0 if settings.overlap else assumed["host_serial"]
    parts[HOST] = longer - gpu_us + serial * shorter
    return LayerTime(parts=parts, forward=forward)


def _host_us(model: Architecture, settings: TrainingSettings, assumed: Assumptions) -> float:
    """Time to start the kernels of a layer, forward and backward."""
    host_us = assumed["host_layer_us"] * assumed["host_platform_ratio"]
    if model.is_latent:
        host_us *= assumed["host_latent_ratio"]
    if settings.graphs:
        host_us *= assumed["host_graph_ratio"]
    if settings.recompute == "full":
        host_us *= 1 + assumed["host_forward_share"]
    return host_us
