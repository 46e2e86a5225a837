"""Called after every step of an optimizer: what torch's hook sees, and a step that is replayed."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from monta_megatron.common.import_hook import after_import


def after_optimizer_steps(function: Callable[[], None]) -> None:
    """Call `function()` after each step of any optimizer of this process, inner ones too."""

    def call_it(*_: Any) -> None:
        function()

    def after_replays(module: ModuleType) -> None:
        # A graph that replays a step (--optimizer-cuda-graph) calls no hook of torch's.
        wrapper: Any = module.OptimizerCudaGraphWrapper
        original = wrapper.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            function()
            return result

        wrapper.__call__ = call

    register_optimizer_step_post_hook(call_it)
    after_import("megatron.core.optimizer.optimizer_cuda_graph", after_replays)
