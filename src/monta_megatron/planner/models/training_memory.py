"""Memory of a training on a rank, by one formula: whether a layout fits.

Weights, gradients and the distributed optimizer's state; of the fuller one of the first and the
last pipeline stage the inputs of its layers for all micro-batches in the pipeline (the rest is
recomputed) and the logits; and the exchange. Every stage counts as the largest.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from monta_megatron.common.units import size_text
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.models.model import Model, Reader

# Share of a rank's memory that is left to everything else.
HEADROOM = 0.1


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Memory of a training on one rank.

    Attributes:
        state_bytes: weights, gradients and optimizer state; None where the parameters cannot be
            counted.
        activation_bytes: the inputs of the layers, and the logits on the last stage.
        exchange_bytes: the most that the executor holds at once; see `price.peak_bytes`.
        available_bytes: what a rank may use; None where the cluster file does not say.
    """

    state_bytes: float | None
    activation_bytes: float
    exchange_bytes: float
    available_bytes: float | None

    @property
    def needed_bytes(self) -> float | None:
        """The three together; None where one is not known."""
        if self.state_bytes is None:
            return None
        return self.state_bytes + self.activation_bytes + self.exchange_bytes

    @property
    def fits(self) -> bool:
        """Whether they leave the headroom; True where one of the two is not known."""
        needed, available = self.needed_bytes, self.available_bytes
        return needed is None or available is None or needed <= (1 - HEADROOM) * available

    @property
    def text(self) -> str:
        """Needed and available memory, by part."""
        if self.state_bytes is None:
            return "a memory that is not known, as the model's parameters cannot be counted"
        of = "a rank's memory (memory_gb_per_rank: not in the cluster file)"
        if self.available_bytes is not None:
            of = f"a rank's {size_text(self.available_bytes)}"
            of += "" if self.fits else f", does not fit with {HEADROOM:.0%} headroom"
        return (
            f"{size_text(self.needed_bytes)} of {of}: weights, gradients, optimizer "
            f"{size_text(self.state_bytes)}, layer inputs and logits "
            f"{size_text(self.activation_bytes)}, exchange {size_text(self.exchange_bytes)}"
        )

    def document(self) -> dict[str, Any]:
        """The fields of a JSON document."""
        return {**asdict(self), "needed_bytes": self.needed_bytes, "fits": self.fits}


def training_memory(
    model: Model, cluster: Cluster, layout: ParallelLayout, tokens: int, exchange_bytes: float
) -> TrainingMemory:
    """Memory of a training on a rank of the first or the last pipeline stage.

    Args:
        model: the trained model.
        cluster: the cluster it is trained on.
        layout: how the ranks are grouped.
        tokens: of a rank in a micro-batch.
        exchange_bytes: the most that an exchange holds.
    """
    inputs = float(tokens * model.hidden_size * model.value_bytes * _of_stage(model, layout))
    vocabulary = Reader(model.arguments, model.name).size("vocab-size", 0, least=0)
    # [S * B / CP, V / TP] as they are, and in fp32 for the loss.
    logits = tokens * vocabulary * (model.value_bytes + 4)
    return TrainingMemory(
        state_bytes=state_bytes(model, layout),
        # The first stage has pp micro-batches in flight, the last has one.
        activation_bytes=max(inputs * layout.pp, inputs + logits),
        exchange_bytes=exchange_bytes,
        available_bytes=cluster.memory_bytes_per_rank,
    )


def state_bytes(model: Model, layout: ParallelLayout) -> float | None:
    """Bytes of weights, gradients and optimizer state on a rank; None where not known.

    Mixed precision: weights in 16 bits and gradients in 32 on every rank; master weights and two
    moments in 32 bits, sharded over data-parallel ranks. In fp32 there are no master weights.
    """
    if model.num_parameters is None:
        return None
    held, sharded = (4 + 4, 2 * 4) if model.value_bytes == 4 else (2 + 4, 3 * 4)
    total, experts = 0.0, model.num_expert_parameters
    for parameters, parts in (
        (model.num_parameters - experts, layout.tp),
        (experts, layout.ep * layout.etp),
    ):
        on_rank = parameters / parts * _of_stage(model, layout) / model.num_layers
        data_parallel = layout.world_size / (parts * layout.pp)
        total += on_rank * (held + sharded / data_parallel)
    return total


def _of_stage(model: Model, layout: ParallelLayout) -> int:
    """Layers of the largest pipeline stage."""
    return math.ceil(model.num_layers / layout.pp)
