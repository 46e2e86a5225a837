"""Statistics of the MoE layers of this process."""

from dataclasses import dataclass

from monta_megatron.core import Choice
from monta_megatron.exchange.count_messages import busiest_over_mean
from monta_megatron.integration.ranks import layers


@dataclass(frozen=True, kw_only=True)
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
    statistics = []
    for layer in layers():
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
