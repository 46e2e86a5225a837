"""How an MoE layer gets our dispatcher: by a patch of MoELayer, or by a spec.

Either way `build_with_monta` constructs the layer as for stock alltoall, builds our dispatcher, set
up together with the layer's other ranks (`layer_setup`), and puts it in stock's place.

Megatron is imported in functions, not at the top: its import calls `patch_moe_layer` of this file.
"""

import copy
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from monta_megatron.common.errors import UserError
from monta_megatron.core import Choice
from monta_megatron.exchange.count_messages import busiest_over_mean
from monta_megatron.exchange.launch_order import set_launch_order
from monta_megatron.integration.arguments import (
    check_schedule,
    holds_up_others,
    is_monta,
    refuse,
    seen_as_alltoall,
)
from monta_megatron.integration.ranks import reports_for_stage

# The MoE layers with our dispatcher.
_layers: weakref.WeakSet[Any] = weakref.WeakSet()


def patch_moe_layer(moe_layer: ModuleType) -> None:
    """Make `moe_layer.MoELayer` build our dispatcher if its configuration says "monta"."""
    original = moe_layer.MoELayer.__init__

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if is_monta(config):
            build_with_monta(original, self, config, *args, **kwargs)
        else:
            original(self, config, *args, **kwargs)

    moe_layer.MoELayer.__init__ = __init__


def build_with_monta(
    construct: Callable[..., None], layer: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Construct an MoE layer as for stock alltoall, then replace its dispatcher with ours.

    Args:
        construct: MoELayer's constructor.
        layer: the layer under construction.
        config: its TransformerConfig; the dispatcher keeps it.

    Raises:
        UserError: the dispatcher cannot run here, which ends a training with one line and exit
            status 2.
    """
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from monta_megatron.integration.dispatcher import MontaTokenDispatcher

    set_launch_order(holds_up_others(config))
    given = inspect.signature(construct).bind_partial(layer, config, *args, **kwargs).arguments
    groups = (given | kwargs).get("pg_collection") or get_default_pg_collection()
    try:
        check_schedule(config)
        with seen_as_alltoall(config):
            construct(layer, config, *args, **kwargs)
        dispatcher = MontaTokenDispatcher(
            layer.num_local_experts, layer.local_expert_indices, config=config, pg_collection=groups
        )
        # All ranks have agreed on the option by now, so none refuses its experts alone.
        if dispatcher.setup.options.overlap_experts:
            # Only trainings that ask for it import it.
            from monta_megatron.integration.experts import prepare_layer

            prepare_layer(layer)
    except UserError as error:
        refuse(error, reports_for_stage(groups.tp_ep, groups))
    if layer.token_dispatcher.shared_experts is not None:
        dispatcher.set_shared_experts(layer.token_dispatcher.shared_experts)
    if hasattr(layer, "_training_token_dispatcher"):
        layer._training_token_dispatcher = dispatcher
    layer.token_dispatcher = dispatcher
    # The dispatcher must not keep its layer alive.
    dispatcher.moe_layer = weakref.ref(layer)
    _layers.add(layer)


@functools.cache
def monta_moe_layer() -> type:
    """The MoE layer class for layer specs: always our dispatcher."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    class MontaMoELayer(MoELayer):
        """Megatron's MoE layer with the monta token dispatcher."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            build_with_monta(MoELayer.__init__, self, config, *args, **kwargs)

    return MontaMoELayer


def with_monta(spec: Any) -> Any:
    """See `api.with_monta`; dataclasses that hold no MoE layer are shared with the copy."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    num_found = 0

    def copied(part: Any) -> Any:
        # Megatron's specs are dataclasses, partials (megatron-core >= 0.18 builds the MoE layer
        # from one), lists and mappings, around classes. Anything else stays as it is.
        nonlocal num_found
        if part is MoELayer:
            num_found += 1
            return monta_moe_layer()
        if isinstance(part, functools.partial):
            function, arguments = copied(part.func), copied(part.args)
            return functools.partial(function, *arguments, **copied(part.keywords))
        if isinstance(part, list | tuple):
            # A named tuple takes its entries one by one.
            return getattr(part, "_make", type(part))([copied(entry) for entry in part])
        if isinstance(part, dict):
            return {name: copied(entry) for name, entry in part.items()}
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            num_before = num_found
            names = [entry.name for entry in dataclasses.fields(part)]
            values = {name: copied(getattr(part, name)) for name in names}
            if num_found > num_before:
                part = copy.copy(part)
                for name, value in values.items():
                    setattr(part, name, value)
        return part

    changed = copied(spec)
    if num_found == 0:
        raise UserError("spec: holds no MoELayer, so there is no dispatcher to replace")
    return changed


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """Statistics of the exchanges of one MoE layer on this rank.

    Attributes:
        layer_number: the layer's number in the model, from 1; None if it has none.
        choice: of the last micro-batch; None before the first.
        inter_bytes: payload sent by this rank to other nodes.
        intra_bytes: payload sent by it to other ranks on its node.
        busiest_over_mean: rows received by the busiest rank of the exchange over the mean, in the
            exchange before the last; None if unknown.
    """

    layer_number: int | None
    choice: Choice | None
    inter_bytes: int
    intra_bytes: int
    busiest_over_mean: float | None


def layer_statistics() -> list[LayerStatistics]:
    """Statistics of this process's MoE layers that use our dispatcher, in model order."""
    # Inference may replace the dispatcher.
    ours = [layer for layer in _layers if hasattr(layer.token_dispatcher, "chooser")]
    statistics = []
    for layer in sorted(ours, key=lambda layer: layer.layer_number or 0):
        dispatcher = layer.token_dispatcher
        sent = dispatcher.monitor.bytes_by_resource()
        statistics.append(
            LayerStatistics(
                layer_number=layer.layer_number,
                choice=dispatcher.choice,
                inter_bytes=sent["inter"],
                intra_bytes=sent["intra"],
                busiest_over_mean=busiest_over_mean(dispatcher.received_rows),
            )
        )
    return statistics
