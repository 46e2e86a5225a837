"""A CUDA device that is not there, and what may stop its host.

Inside a `FakeDevice` tensors have device="cuda", shapes and strides, but no values, so code takes
the branch that it takes on a GPU. Streams and events are a `Recorder`'s. What a GPU would make the
host wait for is refused by name, and so is every copy between host and device, unless the function
that makes it is listed; a listed copy still has to be one that the host does not wait for.

What torch's fake tensors do not see by themselves: `.cpu()`, `.to("cpu")`, torch.tensor and lists
as indices (all of them copies between devices), pageable and blocking copies, waits for events.
"""

import importlib.util
import sys
import unittest
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
from fake_kernels import recorded_launches
from numpy.typing import NDArray
from stream_recorder import RecordedEvent, RecordedStream, Recorder
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monta_megatron.exchange import collectives, executor, kernels, operations, streams
from monta_megatron.exchange.collectives import PeerGroup

try:
    import torch.testing._internal.distributed.fake_pg

    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.empty(1, device="cuda")[0]  # A torch built for CPUs alone cannot do this.
except (ImportError, RuntimeError, AssertionError) as error:
    # pytest skips what imports this; scripts, which need no pytest, say it.
    raise unittest.SkipTest(
        f"torch {torch.__version__} has no fake tensors on cuda, or no fake process group: {error}"
    ) from error

HAS_TRITON = importlib.util.find_spec("triton") is not None
PACKAGE = "monta_megatron."
COPIES = ("_to_copy", "copy_")
STARTS = ("start_all_to_all", "start_all_gather")
INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put")


class HostWaitsError(AssertionError):
    """The host would wait for the device, or memory would cross over, where that is not listed."""


class FakeDevice(TorchDispatchMode):
    """Makes tensors on a device that is not there; refuses what its host would wait for.

    Attributes:
        recorder: of streams, events, accesses and the life of memory.
        crossings: what listed functions did, in order: "module.function waits for the device",
            "module.function copies to the device".
    """

    def __init__(
        self, listed: Collection[str] = (), host_values: NDArray[np.int64] | None = None
    ) -> None:
        """Prepare a device.

        Args:
            listed: "module.function" in the package, without its name, for each function that may
                copy between host and device without a wait, or wait for an event.
            host_values: what a listed copy to the host brings; None for nothing to read.
        """
        super().__init__()
        self.recorder = Recorder()
        self.crossings: list[str] = []
        self._listed = listed
        self._host_values = host_values
        self._context = ExitStack()

    def __enter__(self) -> "FakeDevice":
        starts = {name: self._started(getattr(operations, name)) for name in STARTS}
        # Innermost first: the fake tensors, what is recorded of them, what is refused.
        self._context.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self._context.enter_context(self.recorder)
        if HAS_TRITON:
            self._context.enter_context(recorded_launches(self.recorder.kernel))
        waits: Any = {"create": True, "synchronize": lambda *_: self._cross("waits for the device")}
        for patch in (
            # As on a device: chosen by where the rows are.
            mock.patch.object(executor, "streams_for", streams.streams_for),
            mock.patch.multiple(operations, **starts),
            mock.patch.multiple(
                torch.cuda,
                current_device=lambda: 0,
                synchronize=lambda device=None: self._cross("waits for the device"),
            ),
            mock.patch.object(torch.Tensor, "pin_memory", _pinned),
            # A kernel cannot be built to see whether one can be.
            mock.patch.object(kernels, "kernel_problem", lambda _: "" if HAS_TRITON else "none"),
            mock.patch.multiple(RecordedEvent, **waits),
            mock.patch.multiple(RecordedStream, **waits),
        ):
            self._context.enter_context(patch)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._context.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == "aten":
            if name in COPIES and (source := _crosses(args, kwargs)) is not None:
                self._check_copy(name, source, args, kwargs)
                copy = func(*args, **kwargs)
                if source.is_cuda and self._host_values is not None:
                    self._bring_values(copy)
                return copy
            self._check(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what has to ask the device for a value or a size, or takes tensors of both."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # A number in a tensor of the host is passed to a kernel like any number.
        devices = {each.device.type for each in tensors if each.is_cuda or each.dim() > 0}
        if "cuda" not in devices:
            return
        if len(devices) > 1:
            raise HostWaitsError(f"{name} takes tensors of the host and of the device")
        if torch.Tag.data_dependent_output in func.tags:
            raise HostWaitsError(f"{name} asks the device for a value")
        if name in INDEXING:
            indices = (each for each in args[1] if isinstance(each, torch.Tensor))
            if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
                raise HostWaitsError(f"{name} asks the device how much a mask selects")
        elif torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
            raise HostWaitsError(f"{name} asks the device for a size")

    def _check_copy(
        self, name: str, source: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuse copies between host and device, but listed ones that the host does not wait for.

        The host's side has to be pinned. What a non-blocking `.to("cpu")` makes is; torch says so.
        """
        where = "to the host" if source.is_cuda else "to the device"
        if not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])):
            raise HostWaitsError(f"a blocking copy {where}")
        on_host = args[0] if source.is_cuda else source
        makes_pinned = name == "_to_copy" and source.is_cuda
        if not (makes_pinned or getattr(on_host, "_is_pinned_here", False)):
            raise HostWaitsError(f"a copy {where} of pageable memory")
        self._cross(f"copies {where}")

    def _bring_values(self, copy: torch.Tensor) -> None:
        """Give a copy on the host what `numpy` reads; fake tensors have no values."""
        values = self._host_values
        assert values is not None and values.shape == copy.shape, "other values are copied"

        def numpy() -> NDArray[np.int64]:
            self._cross("reads a copy")
            return values

        copy.numpy = numpy  # type: ignore[method-assign]

    def _cross(self, what: str) -> None:
        function = _function_of_the_package()
        if function not in self._listed:
            raise HostWaitsError(f"{function} {what}: not listed")
        self.crossings.append(f"{function} {what}")

    def _started(self, start: Any) -> Any:
        """A collective that is started through torch.distributed, and recorded.

        It is checked for what NCCL, or torch's binding of it, takes for granted: a fake process
        group checks nothing.
        """

        def started(
            output: torch.Tensor,
            input_: torch.Tensor,
            receive: list[int],
            send: list[int],
            group: PeerGroup,
        ) -> Any:
            num_sent = send[0] if start is collectives.start_all_gather else sum(send)
            assert input_.is_cuda and output.is_cuda, "a message on the host"
            assert input_.dtype == output.dtype and input_.shape[1:] == output.shape[1:]
            assert len(receive) == group.size and sum(receive) == output.shape[0]
            assert len(send) == group.size and num_sent == input_.shape[0]
            assert send[group.rank] == receive[group.rank]
            with self.recorder.muted():
                start(output, input_, receive, send, group)
            return self.recorder.collective(output, input_, None, group)

        return started


def _crosses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The source of a copy between host and device; None if it stays where it is."""
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        into, source = args[0].device, args[1]
    else:
        source = args[0]
        into = torch.device(kwargs.get("device") or source.device)
    return source if into.type != source.device.type else None


def _pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """In place of `Tensor.pin_memory`, which needs a driver."""
    assert not tensor.is_cuda, "only memory of the host is pinned"
    pinned = tensor.clone()
    pinned._is_pinned_here = True  # type: ignore[attr-defined]
    return pinned


def _function_of_the_package() -> str:
    """The innermost function of the package that is running, without the package's name."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        module = frame.f_globals.get("__name__", "")
        if module.startswith(PACKAGE):
            return f"{module.removeprefix(PACKAGE)}.{frame.f_code.co_name}"
    return "a function outside the package"
