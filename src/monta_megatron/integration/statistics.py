"""What the exchanges of a running model have done so far, layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monta_megatron.integration.iteration import layers

if TYPE_CHECKING:
    from monta_megatron.planner.online.drift import WatchedIteration


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """What the exchanges of one MoE layer have done on this rank.

    Attributes:
        layer_number: the layer's number in the model, from 1; None where it was given none.
        chain: the chain of the last micro-batch.
        num_chunks: its number of chunks.
        inter_bytes: payload that left this rank for other nodes.
        intra_bytes: payload that left it for other ranks on its node.
        choices: (chain, number of chunks) -> exchanges that ran by them, recomputed ones included.
        watched: the last watched iteration of the exchange that the layer belongs to, with all
            layers of its shape; None before the first one is known, and where nothing is watched.
    """

    layer_number: int | None
    chain: str
    num_chunks: int
    inter_bytes: int
    intra_bytes: int
    choices: Mapping[tuple[str, int], int]
    watched: "WatchedIteration | None"


def layer_statistics() -> list[LayerStatistics]:
    """Of every MoE layer of this process that has our dispatcher, in the order of the model."""
    statistics = []
    for layer in layers():
        dispatcher = layer.token_dispatcher
        sent = dispatcher.monitor.bytes_by_resource()
        statistics.append(
            LayerStatistics(
                layer_number=layer.layer_number,
                chain=dispatcher.chain.name,
                num_chunks=dispatcher.num_chunks,
                inter_bytes=sent["inter"],
                intra_bytes=sent["intra"],
                choices=dict(dispatcher.monitor.choices),
                watched=dispatcher.watched,
            )
        )
    return statistics
