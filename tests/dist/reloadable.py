"""Process groups that a framework wraps, destroys and makes again, in the usual shape.

Frameworks that train and generate on the same GPUs replace torch's `new_group` by a function that
records its calls and wraps what they return, and torch's other functions by some that take what is
wrapped. Before generation every wrapped group is destroyed; afterwards the calls are repeated.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

# Functions of torch that take a group.
TAKE_GROUPS = [
    name
    for name in distributed_c10d.__all__
    if inspect.isfunction(function := getattr(distributed_c10d, name))
    and "group" in inspect.signature(function).parameters
]


class Wrapped(dist.ProcessGroup):
    """Forwards the methods of a group to the one that is in it now, but no properties."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner: dist.ProcessGroup | None = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _forward(name: str) -> Callable[..., Any]:
    def forward(self: Wrapped, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return forward


for _name in dir(dist.ProcessGroup):
    _is_method = callable(_value := getattr(dist.ProcessGroup, _name))
    if _is_method and not isinstance(_value, type) and not _name.startswith("__"):
        setattr(Wrapped, _name, _forward(_name))


@dataclass
class Reloadable:
    """All groups that were made while `reloadable_groups` was on.

    `calls`: of `new_group`, with what they returned: a wrapped group, or another thing on ranks
    that are not in it.
    """

    new_group: Callable[..., Any]
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """`new_group`, recorded."""
        group = self.new_group(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup):
            group = Wrapped(group)
        self.calls.append((group, args, kwargs))
        return group

    def sleep(self) -> None:
        """Destroy every group."""
        for group, _, _ in self.calls:
            if isinstance(group, Wrapped):
                dist.destroy_process_group(group.inner)
                group.inner = None

    def wake(self) -> None:
        """Make every group again, by all ranks in the order in which they were made."""
        for group, args, kwargs in self.calls:
            made = self.new_group(*args, **kwargs)
            if isinstance(group, Wrapped):
                group.inner = made


@contextlib.contextmanager
def reloadable_groups() -> Iterator[Reloadable]:
    """Wrap every group that is made."""

    def inside(value: Any) -> Any:
        return value.inner if isinstance(value, Wrapped) else value

    def unwrapping(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            named = {name: inside(value) for name, value in kwargs.items()}
            return function(*map(inside, args), **named)

        return call

    reloadable = Reloadable(dist.new_group)
    with contextlib.ExitStack() as replaced:
        for owner in (dist, distributed_c10d):
            replaced.enter_context(mock.patch.object(owner, "new_group", reloadable.make))
        for name in TAKE_GROUPS:
            function = unwrapping(getattr(dist, name))
            replaced.enter_context(mock.patch.object(dist, name, function))
        yield reloadable
