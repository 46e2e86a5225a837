"""Kernels compiled ahead of time for GPUs that are not there, as their launches would compile them.

A wrapper is called with tensors of the host, and its launch is caught: what Triton's launcher would
derive from the arguments (types, alignment, constants) is what is compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.compiler import ASTSource
from triton.runtime import jit
from triton.runtime.driver import driver

TARGETS = {f"sm_{capability}": GPUTarget("cuda", capability, 32) for capability in (80, 90, 100)}


@dataclass(frozen=True)
class Launch:
    """One launch that a wrapper made.

    Attributes:
        kernel: what is launched.
        args: its arguments, in order.
        options: those of the compiler.
        grid: programs on each axis.
    """

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    grid: tuple[int, ...]

    def variant(self, target: GPUTarget) -> tuple[Any, Any]:
        """What the launcher derives from the arguments, and the options of the compiler."""
        asked = {"debug": False, **self.options}
        binder = jit.create_function_from_signature(
            self.kernel.signature, self.kernel.params, CUDABackend(target)
        )
        _, specialization, options = binder(*self.args, **asked)
        return specialization, options

    def compile(self, target: GPUTarget) -> "Compiled":
        """What runs on such a GPU."""
        specialization, options = self.variant(target)
        # What `JITFunction.run` does before it compiles.
        bound = dict(zip(self.kernel.arg_names, self.args, strict=True))
        options, signature, constants, attributes = self.kernel._pack_args(
            CUDABackend(target),
            {"debug": False, **self.options},
            bound,
            specialization,
            options,
        )
        source = ASTSource(self.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=target, options=options.__dict__)
        return Compiled(ptx=compiled.asm["ptx"], target=target)


@dataclass(frozen=True)
class Compiled:
    """A kernel for one kind of GPU."""

    ptx: str
    target: GPUTarget

    def count(self, instruction: str) -> int:
        """How often an instruction occurs in the PTX, by a regular expression."""
        return len(re.findall(rf"\b{instruction}\b", self.ptx))

    @cached_property
    def _report(self) -> str:
        architecture = re.search(r"^\.target (\w+)", self.ptx, re.MULTILINE)
        assert architecture
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.ptx"
            path.write_text(self.ptx)
            assembler = [get_ptxas(self.target.arch).path, "-v", f"-arch={architecture[1]}"]
            result = subprocess.run(
                [*assembler, path, "-o", path.with_suffix(".cubin")], capture_output=True, text=True
            )
        assert result.returncode == 0, result.stderr
        return result.stderr

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return max(map(int, re.findall(r"Used (\d+) registers", self._report)))

    @property
    def spilled_bytes(self) -> int:
        """Bytes that a thread keeps in memory for want of registers, and its stack."""
        return sum(map(int, re.findall(r"(\d+) bytes (?:stack|spill)", self._report)))


@contextmanager
def no_driver(launched: Callable[..., None] = lambda *_: None) -> Iterator[None]:
    """Context in which Triton compiles for a GPU that is not there, and its launcher does nothing.

    All that a launch does before the launcher of the driver is done as on a GPU: arguments are
    bound and told apart, the compiled kernel is looked up.

    Args:
        launched: called with what the launcher would be called with.
    """
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
        # Module, function, registers, spills, threads of a program at most.
        load_binary=lambda *_: (object(), object(), 0, 0, 1024),
    )
    nothing = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGETS["sm_90"],
        launcher_cls=lambda source, metadata: launched,
        utils=utils,
    )
    with mock.patch.object(driver, "_active", nothing):
        yield


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """What wrappers launch meanwhile; nothing runs."""
    caught: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        caught.append(Launch(kernel, args, options, grid))

    with mock.patch.object(jit.JITFunction, "run", run):
        yield caught
