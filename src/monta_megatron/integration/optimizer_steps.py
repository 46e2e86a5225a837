"""Optimizer steps of this process: a call at the entry of each, and the time of an iteration.

In Megatron every outermost call of `step` counts as one step: a skipped step, the step of a stub,
a chain of optimizers, the wrapper that replays a captured step. Outside of Megatron every step of a
PyTorch optimizer counts.

Existing hooks are not enough: Megatron's `post_training_step_callbacks` run after the step and only
in its own training loop; PyTorch's hooks miss skipped steps and count each optimizer of a chain.

The time is taken from events on a device, from the host's clock on CPU ranks.
"""

import functools
import time
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
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


# An event of a device, or nanoseconds of the host's clock.
Mark: TypeAlias = torch.cuda.Event | int


class Segment(NamedTuple):
    """An interval between two marks of one clock."""

    start: Mark
    end: Mark


class IterationClock:
    """Measures the segments of an iteration without waiting for the device.

    clock.start(device); clock.stop(); ...; segments = clock.take()
    """

    def __init__(self) -> None:
        self._start: Mark | None = None
        self._segments: list[Segment] = []

    def start(self, device: torch.device) -> None:
        """Begin a segment, unless one is open."""
        if self._start is None:
            self._start = _mark(on_host=device.type != "cuda")

    def stop(self) -> None:
        """End the open segment, if any."""
        if self._start is not None:
            end = _mark(on_host=isinstance(self._start, int))
            self._segments += [] if end is None else [Segment(self._start, end)]
            self._start = None

    def take(self) -> list[Segment]:
        """Segments since the last call; `us_of` can read them once the host has synchronized."""
        segments, self._segments = self._segments, []
        return segments


def us_of(segments: list[Segment]) -> float | None:
    """Total microseconds; None without segments or while the device is still in one."""
    total_us = 0.0
    for start, end in segments:
        if isinstance(start, int) or isinstance(end, int):
            assert isinstance(start, int) and isinstance(end, int), "one clock"
            total_us += (end - start) / 1e3
        elif end.query():
            total_us += start.elapsed_time(end) * 1e3
        else:
            return None
    return total_us if segments else None


def _mark(on_host: bool) -> Mark | None:
    """A mark; None during CUDA graph capture, where the event would be part of the graph."""
    if on_host:
        return time.perf_counter_ns()
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
