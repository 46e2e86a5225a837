"""Calls a function at the entry of every optimizer step of this process.

In Megatron every outermost call of `step` counts as one step: a skipped step, the step of a stub,
a chain of optimizers, the wrapper that replays a captured step. Outside of Megatron every step of a
PyTorch optimizer counts. Megatron itself steps PyTorch optimizers to make their states before it
loads a checkpoint; those steps do not count.

Existing hooks are not enough: Megatron's `post_training_step_callbacks` run after the step and only
in its own training loop; PyTorch's hooks miss skipped steps and count each optimizer of a chain.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from monta_megatron.common.import_hook import after_import

# Depth of nested calls of Megatron's `step`.
_depth = 0


@functools.cache
def call_at_steps(function: Callable[[Any], None]) -> None:
    """Call `function(optimizer)` at every step's entry; cached: a second call changes nothing."""

    def outermost(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            global _depth
            if _depth == 0:
                function(self)
            _depth += 1
            try:
                return step(self, *args, **kwargs)
            finally:
                _depth -= 1

        return counted

    def of_torch(optimizer: Any, *_: Any) -> None:
        if _depth == 0 and not _is_called_by("megatron.core.optimizer"):
            function(optimizer)

    def wrap(optimizer: Any) -> None:
        if "step" in vars(optimizer):
            optimizer.step = outermost(optimizer.step)

    def of_megatron(module: ModuleType) -> None:
        base: Any = module.MegatronOptimizer
        classes = [base]
        for each in classes:
            wrap(each)
            classes += each.__subclasses__()

        def __init_subclass__(cls: Any, **kwargs: Any) -> None:
            super(base, cls).__init_subclass__(**kwargs)
            wrap(cls)

        # Subclasses that are defined later.
        base.__init_subclass__ = classmethod(__init_subclass__)

    def of_graphs(module: ModuleType) -> None:
        wrapper: Any = module.OptimizerCudaGraphWrapper
        wrapper.__call__ = outermost(wrapper.__call__)

    register_optimizer_step_pre_hook(of_torch)
    after_import("megatron.core.optimizer.optimizer", of_megatron)
    after_import("megatron.core.optimizer.optimizer_cuda_graph", of_graphs)


def _is_called_by(package: str) -> bool:
    """Whether a caller, direct or not, is a function of a package."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if str(frame.f_globals.get("__name__")).startswith(package):
            return True
    return False
