"""Process groups that a framework wraps, destroys and makes again, in the usual shape.

Frameworks that train and generate on the same GPUs replace torch's `new_group` by a function that
records its calls and wraps what they return, and torch's other functions by some that take what is
wrapped. Before generation every wrapped group is destroyed; afterwards the calls are repeated.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
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
    return lambda self, *args, **kwargs: getattr(self.inner, name)(*args, **kwargs)


for _name in dir(dist.ProcessGroup):
    _is_method = callable(_value := getattr(dist.ProcessGroup, _name))
    if _is_method and not isinstance(_value, type) and not _name.startswith("__"):
        setattr(Wrapped, _name, _forward(_name))


class Reloadable:
    """All groups that were made while `reloadable_groups` was on."""

    def __init__(self) -> None:
        self._new_group = dist.new_group
        # What each call returned, a wrapped group on ranks that are in it, and its arguments.
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """`new_group`, recorded."""
        group = self._new_group(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup):
            group = Wrapped(group)
        self._calls.append((group, args, kwargs))
        return group

    def sleep(self) -> None:
        """Destroy every group."""
        for group, _, _ in self._calls:
            if isinstance(group, Wrapped):
                dist.destroy_process_group(group.inner)
                group.inner = None

    def wake(self) -> None:
        """Make every group again, by all ranks in the order in which they were made."""
        for group, args, kwargs in self._calls:
            made = self._new_group(*args, **kwargs)
            if isinstance(group, Wrapped):
                group.inner = made


def _unwrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    def inside(value: Any) -> Any:
        return value.inner if isinstance(value, Wrapped) else value

    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: inside(value) for name, value in kwargs.items()}
        return function(*map(inside, args), **named)

    return call


@contextlib.contextmanager
def reloadable_groups() -> Iterator[Reloadable]:
    """Wrap every group that is made."""
    reloadable = Reloadable()
    functions = {name: _unwrapping(getattr(dist, name)) for name in TAKE_GROUPS}
    with (
        mock.patch.multiple(dist, new_group=reloadable.make, **functions),
        mock.patch.object(distributed_c10d, "new_group", reloadable.make),
    ):
        yield reloadable
