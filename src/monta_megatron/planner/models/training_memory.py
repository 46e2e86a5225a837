"""Memory of a training on a rank, by one formula: whether a layout fits.

Weights, gradients and the distributed optimizer's state of the largest pipeline stage, and the
logits. Activations, which depend on recomputation, and the exchange are left to the headroom.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from monta_megatron.common.text import size_text
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.models.model import Model, Reader

# Share of a rank's memory that is left to everything else.
HEADROOM = 0.1


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Memory of a training on one rank.

    Attributes:
        needed_bytes: of weights, gradients, optimizer state and logits; None where the parameters
            cannot be counted.
        available_bytes: what a rank may use; None where the cluster file does not say.
    """

    needed_bytes: float | None
    available_bytes: float | None

    @property
    def fits(self) -> bool:
        """Whether the headroom is left; True where one of the two is not known."""
        needed, available = self.needed_bytes, self.available_bytes
        return needed is None or available is None or needed <= (1 - HEADROOM) * available

    @property
    def text(self) -> str:
        """Needed and available memory."""
        if self.needed_bytes is None:
            return "a memory that is not known, as the model's parameters cannot be counted"
        of = "a rank's memory (memory_gb_per_rank: not in the cluster file)"
        if self.available_bytes is not None:
            of = f"a rank's {size_text(self.available_bytes)}"
        text = (
            f"{size_text(self.needed_bytes)} of {of} for weights, gradients, optimizer and logits"
        )
        return text if self.fits else f"{text}; does not fit with {HEADROOM:.0%} headroom"

    def document(self) -> dict[str, Any]:
        """The fields of a JSON document."""
        return {**asdict(self), "fits": self.fits}


def training_memory(
    model: Model, cluster: Cluster, layout: ParallelLayout, tokens: int
) -> TrainingMemory:
    """Memory of a training on a rank.

    Mixed precision: weights in 16 bits and gradients in 32 on every rank; master weights and two
    moments in 32 bits, sharded over data-parallel ranks. In fp32 there are no master weights.

    Args:
        model: the trained model.
        cluster: the cluster it is trained on.
        layout: how the ranks are grouped.
        tokens: of a rank in a micro-batch.
    """
    if model.num_parameters is None:
        return TrainingMemory(needed_bytes=None, available_bytes=cluster.memory_bytes_per_rank)
    held, sharded = (4 + 4, 2 * 4) if model.value_bytes == 4 else (2 + 4, 3 * 4)
    vocabulary = Reader(model.arguments, model.name).size("vocab-size", 0, least=0)
    # [S * B / CP, V / TP] as they are, and in fp32 for the loss.
    needed_bytes = float(tokens * vocabulary * (model.value_bytes + 4))
    share_of_stage = math.ceil(model.num_layers / layout.pp) / model.num_layers
    experts = model.num_expert_parameters
    for parameters, parts in (
        (model.num_parameters - experts, layout.tp),
        (experts, layout.ep * layout.etp),
    ):
        data_parallel = layout.world_size / (parts * layout.pp)
        needed_bytes += parameters / parts * share_of_stage * (held + sharded / data_parallel)
    return TrainingMemory(needed_bytes=needed_bytes, available_bytes=cluster.memory_bytes_per_rank)
