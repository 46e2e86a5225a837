"""Called after every step of an optimizer: what torch's hook sees, and a step that is replayed."""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from monta_megatron.common.import_hook import after_import

# In the order in which they were given.
_functions: dict[Callable[[], None], None] = {}


def after_optimizer_steps(function: Callable[[], None]) -> Callable[[], None]:
    """Call `function()` after each step of any optimizer of this process, inner ones too.

    Returns:
        What ends that, if it has not ended.
    """
    _watch()
    _functions[function] = None

    def stop() -> None:
        _functions.pop(function, None)

    return stop


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
