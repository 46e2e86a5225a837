"""Figures of a training: statistics by layer, and calls after each step of an optimizer.

Imported only where they are asked for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from monta_megatron.common.import_hook import after_import
from monta_megatron.integration.ranks import layers

# In the order in which they were given.
_functions: dict[Callable[[], None], None] = {}


def after_optimizer_steps(function: Callable[[], None]) -> None:
    """Call `function()` after each step of any optimizer of this process, inner ones too."""
    _watch()
    _functions[function] = None


@cache
def _watch() -> None:
    def call_all(*_: Any) -> None:
        for function in list(_functions):
            function()

    def after_replays(module: ModuleType) -> None:
        # A graph that replays a step (--optimizer-cuda-graph) calls no hook of torch's.
        wrapper: Any = module.OptimizerCudaGraphWrapper
        original = wrapper.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            call_all()
            return result

        wrapper.__call__ = call

    register_optimizer_step_post_hook(call_all)
    after_import("megatron.core.optimizer.optimizer_cuda_graph", after_replays)


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """Statistics of the exchanges of one MoE layer on this rank.

    Attributes:
        layer_number: the layer's number in the model, from 1; None where it was given none.
        chain: the chain of the last micro-batch.
        num_chunks: its number of chunks.
        inter_bytes: payload that left this rank for other nodes.
        intra_bytes: payload that left it for other ranks on its node.
        choices: (chain, number of chunks) -> exchanges that ran by them, recomputed ones included.
    """

    layer_number: int | None
    chain: str
    num_chunks: int
    inter_bytes: int
    intra_bytes: int
    choices: Mapping[tuple[str, int], int]


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
            )
        )
    return statistics
