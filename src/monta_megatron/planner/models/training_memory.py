"""Whether a training fits into the memory of a rank: its state, its activations and its exchange.

It counts what has to be held at the least, so that no layout is left out that could train: pipeline
stages of the same size, and of every layer its input alone, from which the rest is recomputed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from monta_megatron.chains import CHAINS
from monta_megatron.common.units import size_text
from monta_megatron.planner.chain_price import CHECK_TOKENS, communicator_bytes
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.models.model import Model
from monta_megatron.planner.plan import Plan, slowest_plan
from monta_megatron.planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """State held by a training, by its settings.

    Attributes:
        bytes_per_parameter: on every rank of a data parallel group.
        sharded_bytes_per_parameter: divided among the ranks of that group.
        num_micro_batches: of an iteration; None if there are enough to fill the pipeline.
        layers_per_input: layers of which one input is kept; None if none stays on the device.
        num_layers: of the part of the model that is trained; None for all of it.
    """

    bytes_per_parameter: float
    sharded_bytes_per_parameter: float
    num_micro_batches: int | None = None
    layers_per_input: int | None = 1
    num_layers: int | None = None


# The distributed optimizer. Mixed precision: weights in 16 bits and gradients in 32 on every rank;
# master weights and two moments in 32 bits, sharded.
MIXED_PRECISION = HeldState(bytes_per_parameter=2 + 4, sharded_bytes_per_parameter=3 * 4)
# Weights, gradients and moments in 32 bits; there are no master weights.
FULL_PRECISION = HeldState(bytes_per_parameter=4 + 4, sharded_bytes_per_parameter=2 * 4)


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Memory of a training on one rank, at the least.

    Attributes:
        state_bytes: weights, gradients and optimizer state.
        activation_bytes: the inputs of the layers, for all micro-batches in the pipeline.
        exchange_bytes: the most that the executor holds at once; see `chain_price.peak_bytes`.
        communicator_bytes: buffers of the chain's communicators.
        check_bytes: what the check of a chain's first use holds, before the exchange begins.
        available_bytes: what a rank may use; None where the cluster file does not say.
        ignored: whether the user goes on without what is available.
    """

    state_bytes: float
    activation_bytes: float
    exchange_bytes: float = 0.0
    communicator_bytes: float = 0.0
    check_bytes: float = 0.0
    available_bytes: float | None
    ignored: bool = False

    @property
    def needed_bytes(self) -> float:
        """The most that is held at once."""
        return self.state_bytes + self.activation_bytes + self._moved_bytes

    @property
    def left_bytes(self) -> float | None:
        """Bytes left for the exchange, lacking if below 0; None where nothing limits it."""
        if self.available_bytes is None or self.ignored:
            return None
        return self.available_bytes - self.state_bytes - self.activation_bytes

    @property
    def fits(self) -> bool:
        """Whether there is enough of it, as far as that is known and wanted."""
        left = self.left_bytes
        return left is None or self._moved_bytes <= left

    @property
    def parts(self) -> str:
        """Held parts and their bytes."""
        held = (
            f"weights, gradients and optimizer {size_text(self.state_bytes)}, layer inputs "
            f"{size_text(self.activation_bytes)} (all else recomputed), exchange "
            f"{size_text(self.exchange_bytes)}"
        )
        if self.check_bytes:
            held += f" (first-use checks, before it, {size_text(self.check_bytes)})"
        if not self.communicator_bytes:
            return held
        return f"{held}, its communicators {size_text(self.communicator_bytes)}"

    @property
    def _moved_bytes(self) -> float:
        """Of the exchange, or the check before it, and its communicators."""
        return max(self.exchange_bytes, self.check_bytes) + self.communicator_bytes

    def describe(self) -> str:
        """Needed and available memory, by part."""
        if self.available_bytes is None:
            of = "a rank's memory (no check, as the cluster file has no memory_gb_per_rank)"
        else:
            of = f"a rank's {size_text(self.available_bytes)}"
            of += ", ignored as asked" if self.ignored else ""
        return f"{size_text(self.needed_bytes)} of {of}, at the least: {self.parts}"

    def document(self) -> dict[str, Any]:
        """The fields of a JSON document."""
        return {**asdict(self), "needed_bytes": self.needed_bytes}


def plan_within_memory(
    workloads: Sequence[Workload],
    cluster: Cluster,
    memory: TrainingMemory,
    *,
    where: str,
    memory_limit_bytes: float | None = None,
    or_least: bool = False,
    **settings: Any,
) -> tuple[Plan, Workload, TrainingMemory]:
    """`plan.slowest_plan` with the chains that leave a training enough memory.

    Args:
        workloads: the exchanges of the layout.
        cluster: the cluster it runs on.
        memory: what the training holds beside them.
        where: the layout, for messages.
        memory_limit_bytes, or_least: as in `select.select_chain`, a limit of the user's beside
            that of the memory.
        settings: passed to `select.select_chain`.

    Returns:
        The plan, its workload, and the memory with its exchange.

    Raises:
        ValueError: no chain can run, or it does not fit; says what is needed.
    """
    communicators = {
        name: max(
            communicator_bytes(chain, workload.layout, cluster.ctas) for workload in workloads
        )
        for name, chain in CHAINS.items()
    }
    left = memory.left_bytes
    if left is not None and (memory_limit_bytes is None or left < memory_limit_bytes):
        # Where every chain holds more, the one that holds the least says what is needed.
        memory_limit_bytes, or_least = max(left, 0.0), True
    beside: dict[str, float] = {}
    if left is not None and memory_limit_bytes is not None:
        # A limit of the user's is for the exchange alone, which may leave room for them.
        room = left - memory_limit_bytes
        beside = {name: max(0.0, taken - room) for name, taken in communicators.items()}
    plan, workload = slowest_plan(
        workloads,
        cluster,
        memory_limit_bytes=memory_limit_bytes,
        or_least=or_least,
        beside_bytes=beside,
        **settings,
    )
    choice = plan.chosen
    assert choice is not None, "it has just been made"
    memory = replace(
        memory,
        exchange_bytes=choice.peak_bytes or 0.0,
        communicator_bytes=communicators[choice.chain],
        check_bytes=max(map(check_bytes, workloads)),
    )
    if not memory.fits:
        raise ValueError(
            f"{where}: needs {size_text(memory.needed_bytes)} on a rank, at the least "
            f"({memory.parts}), must be at most {size_text(memory.available_bytes)}, "
            f"memory_gb_per_rank of {cluster.name}; take more ranks or a larger pp, ep or tp, or "
            "go on with --ignore-memory"
        )
    return plan, workload, memory


def training_memory(
    model: Model,
    cluster: Cluster,
    layout: ParallelLayout,
    workloads: Sequence[Workload],
    *,
    held: HeldState | None = None,
    ignore_memory: bool = False,
) -> TrainingMemory:
    """Memory of a training beside its exchange.

    Args:
        model: the trained model.
        cluster: the cluster it is trained on.
        layout: how the ranks are grouped.
        workloads: the exchanges of the layout, with its tokens.
        held: None for the distributed optimizer in the precision of the model.
        ignore_memory: go on without what is available.
    """
    if held is None:
        held = FULL_PRECISION if model.dtype == "fp32" else MIXED_PRECISION
    tokens = max(workload.tokens_per_rank for workload in workloads)
    return TrainingMemory(
        state_bytes=state_bytes(model, layout, held),
        activation_bytes=tokens
        * model.hidden_size
        * model.value_bytes
        * _num_inputs(model, layout, held),
        available_bytes=cluster.memory_bytes_per_rank,
        ignored=ignore_memory,
    )


def check_bytes(workload: Workload) -> float:
    """The most that the check of a chain's first use holds at once; see `self_check`.

    T tokens, and of both dispatchers [T, H] that come back and [N, H] at the experts, with the
    [N, H] that these make of one of them: N = T * topk * ETP, where every expert gets as many.

    Returns:
        Bytes on a rank; the exchange's own buffers are not there yet. 0 without other ranks.
    """
    layout = workload.layout
    if layout.ep * layout.etp == 1:
        return 0.0
    rows = CHECK_TOKENS * workload.routing.max_experts_per_token * layout.etp
    return float(3 * (CHECK_TOKENS + rows) * workload.hidden_size * workload.value_bytes)


def state_bytes(model: Model, layout: ParallelLayout, held: HeldState = MIXED_PRECISION) -> float:
    """Bytes of weights, gradients and optimizer state on a rank, if pipeline stages are equal."""
    num_parameters = model.num_parameters_billions * 1e9
    experts = min(model.num_expert_parameters, num_parameters)
    total = 0.0
    for parameters, parts in (
        (num_parameters - experts, layout.tp),
        (experts, layout.ep * layout.etp),
    ):
        on_rank = parameters / (parts * layout.pp)
        data_parallel = layout.world_size / (parts * layout.pp)
        total += on_rank * (
            held.bytes_per_parameter + held.sharded_bytes_per_parameter / data_parallel
        )
    return total * _num_layers(model, held) / model.num_layers


def _num_inputs(model: Model, layout: ParallelLayout, held: HeldState) -> float:
    """Layer inputs that a rank of the first stage holds: of its layers, for every micro-batch."""
    if held.layers_per_input is None:
        return 0.0
    in_flight = layout.pp if held.num_micro_batches is None else held.num_micro_batches
    layers = _num_layers(model, held) / layout.pp
    return layers / held.layers_per_input * min(in_flight, layout.pp)


def _num_layers(model: Model, held: HeldState) -> int:
    return model.num_layers if held.num_layers is None else held.num_layers
