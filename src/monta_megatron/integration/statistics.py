"""Statistics of the MoE layers of this process."""

from dataclasses import dataclass

from monta_megatron.core import Choice
from monta_megatron.integration.ranks import layers


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """Statistics of the exchanges of one MoE layer on this rank.

    Attributes:
        layer_number: the layer's number in the model, from 1; None where it was given none.
        choice: of the last micro-batch; None before the first.
        inter_bytes: payload that left this rank for other nodes.
        intra_bytes: payload that left it for other ranks on its node.
        busiest_over_mean: rows that the busiest rank of the exchange received over the mean, in the
            last but one exchange; None where it is not known.
    """

    layer_number: int | None
    choice: Choice | None
    inter_bytes: int
    intra_bytes: int
    busiest_over_mean: float | None


def layer_statistics() -> list[LayerStatistics]:
    """Of every MoE layer of this process that has our dispatcher, in the order of the model."""
    statistics = []
    for layer in layers():
        dispatcher = layer.token_dispatcher
        sent, rows = dispatcher.monitor.bytes_by_resource(), dispatcher.received_rows
        statistics.append(
            LayerStatistics(
                layer_number=layer.layer_number,
                choice=dispatcher.choice,
                inter_bytes=sent["inter"],
                intra_bytes=sent["intra"],
                busiest_over_mean=float(rows.max() / rows.mean()) if rows.any() else None,
            )
        )
    return statistics
