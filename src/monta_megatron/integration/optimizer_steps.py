"""Calls a function at the entry of every optimizer step of this process.

In Megatron every outermost call of `step` counts as one step: a skipped step, the step of a stub,
a chain of optimizers, the wrapper that replays a captured step. Outside of Megatron every step of a
PyTorch optimizer counts.

Existing hooks are not enough: Megatron's `post_training_step_callbacks` run after the step and only
in its own training loop; PyTorch's hooks miss skipped steps and count each optimizer of a chain.
"""

import functools
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from monta_megatron.common.import_hook import after_import

_functions: list[Callable[[Any], None]] = []
# Depth of nested calls of Megatron's `step`.
_depth = 0


def call_at_steps(function: Callable[[Any], None]) -> None:
    """Call `function(optimizer)` at every step's entry; a second call changes nothing."""
    if not _functions:
        register_optimizer_step_pre_hook(_enter_torch_step)
        after_import("megatron.core.optimizer.optimizer", _wrap_optimizers)
        after_import("megatron.core.optimizer.optimizer_cuda_graph", _wrap_replay)
    if function not in _functions:
        _functions.append(function)


def _enter(optimizer: Any) -> None:
    for function in _functions:
        function(optimizer)


def _enter_torch_step(optimizer: Any, *_: Any) -> None:
    """Hook of all PyTorch optimizers.

    Before Megatron loads a checkpoint, it steps PyTorch optimizers to make their states, outside of
    any `step` of its own. Those steps train nothing, and only their callers tell them apart.
    """
    callers = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_stack(None))
    if _depth == 0 and not any(name.startswith("megatron.core.optimizer") for name in callers):
        _enter(optimizer)


def _outermost(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `step` of Megatron's so that it counts unless another one calls it."""

    @functools.wraps(step)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _depth
        if _depth == 0:
            _enter(self)
        _depth += 1
        try:
            return step(self, *args, **kwargs)
        finally:
            _depth -= 1

    return counted


def _wrap_optimizers(optimizer: ModuleType) -> None:
    """Wrap `step` of MegatronOptimizer and of its subclasses, also of those defined later."""
    base: Any = optimizer.MegatronOptimizer

    def wrap(cls: Any) -> None:
        if "step" in vars(cls):
            cls.step = _outermost(cls.step)

    classes = [base]
    for each in classes:
        wrap(each)
        classes += each.__subclasses__()

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        wrap(cls)

    base.__init_subclass__ = classmethod(__init_subclass__)


def _wrap_replay(optimizer_cuda_graph: ModuleType) -> None:
    """Wrap the call that replays a step captured by a CUDA graph."""
    wrapper: Any = optimizer_cuda_graph.OptimizerCudaGraphWrapper
    wrapper.__call__ = _outermost(wrapper.__call__)
