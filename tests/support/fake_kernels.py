"""Launches of Triton kernels, recorded as a device's work: with nothing run, or in the interpreter.

What a kernel reads and writes is in its source: it writes where it stores. Each launch is compared
with the first of its `Launch`, whose variant a GPU would run again without Triton's own checks.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch

# (name of the kernel, what it reads, what it writes)
Launched = Callable[[str, list[torch.Tensor], list[torch.Tensor]], None]


@contextmanager
def recorded_launches(
    launched: Launched, run: Callable[[], AbstractContextManager[Any]] | None = None
) -> Iterator[None]:
    """Context in which launches are told to `launched`; they run inside `run`, if it is given.

    The interpreter copies all of the memory that an argument lies in, and back.
    """
    from monta_megatron.exchange.kernels.tiles import Launch

    usual = Launch.__call__

    def launch(self: Any, num_rows: int, *args: Any) -> None:
        if num_rows == 0:
            return
        stored = _stored(self.kernel)
        given = list(zip(self.kernel.arg_names, (*args, *self.shared), strict=True))
        told_apart = [_told_apart(self.kernel, *each) for each in given]
        assert self.__dict__.setdefault("told_apart", told_apart) == told_apart
        tensors = [(name, value) for name, value in given if isinstance(value, torch.Tensor)]
        launched(
            f"triton {self.kernel.fn.__name__}",
            [tensor for name, tensor in tensors if name not in stored],
            [tensor for name, tensor in tensors if name in stored],
        )
        if run is not None:
            with run():
                usual(self, num_rows, *args)

    with mock.patch.object(Launch, "__call__", launch):
        yield


def _told_apart(function: Any, name: str, value: Any) -> object:
    """What variants of a kernel differ in: None, or a tensor's dtype, device and alignment."""
    if not isinstance(value, torch.Tensor):
        return value is None
    rows = [x.name for x in getattr(function, "params", ()) if not x.do_not_specialize_on_alignment]
    begin_bytes = value.storage_offset() * value.itemsize
    return value.dtype, value.device.type, name not in rows or begin_bytes % 16 == 0


@cache
def _stored(function: Any) -> frozenset[str]:
    """The parameters through which a kernel writes."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    assigned = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }

    def root(pointer: ast.expr) -> str:
        while isinstance(pointer, ast.BinOp):
            pointer = pointer.left
        assert isinstance(pointer, ast.Name)
        is_parameter = pointer.id in function.arg_names
        return pointer.id if is_parameter else root(assigned[pointer.id])

    stored = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id  # type: ignore[attr-defined]
            if name == "store":
                stored.add(root(node.args[0]))
    assert stored, f"{function.fn.__name__} writes nothing"
    return frozenset(stored)
