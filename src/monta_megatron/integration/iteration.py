"""The MoE layers of this process that have our dispatcher, and what an iteration asks of them."""

from typing import Any
from weakref import WeakSet

from monta_megatron.planner.benefit import Iteration

_layers: WeakSet[Any] = WeakSet()


def add_layer(layer: Any) -> None:
    """Keep an MoE layer in mind, for as long as it exists."""
    _layers.add(layer)


def layers() -> list[Any]:
    """The MoE layers that have our dispatcher now, by their numbers in the model.

    In inference Megatron may put another dispatcher in its place.
    """
    ours = [layer for layer in _layers if hasattr(layer.token_dispatcher, "chain_policy")]
    return sorted(ours, key=lambda layer: layer.layer_number or 0)


def iteration_here(dispatcher: Any) -> Iteration:
    """How often an iteration runs the exchange of a dispatcher, on this pipeline stage.

    Layers that choose by the same policy are those of one shape. The micro-batches are unknown
    outside Megatron's training loop.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    try:
        num_micro_batches = get_num_microbatches()
    except AttributeError:
        # The training loop has not made Megatron's calculator.
        num_micro_batches = None
    policies = [layer.token_dispatcher.chain_policy for layer in layers()]
    return Iteration(
        num_moe_layers=policies.count(dispatcher.chain_policy) or None,
        num_stages=dispatcher.config.pipeline_model_parallel_size,
        num_micro_batches=num_micro_batches,
    )
