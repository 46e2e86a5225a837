"""CPU ranks: the real Megatron, unmodified, on Gloo processes without a GPU.

Nobody should need a GPU to develop an expert-parallel layout. `install` replaces what Megatron uses
of CUDA by stand-ins, so that `pretrain_gpt.py` or a layer of megatron.core trains on CPU tensors:
the same code path, the same groups, the same order of collectives. The numbers are right; times are
those of CPUs and of Gloo.

Substitutes:
    device      device="cuda" is the CPU; `tensor.type()` still names CUDA types
    streams     everything runs at once and in order, so streams and events have nothing to do
    generator   torch's CPU generator is the CUDA generator too
    memory      the process's resident memory is the device's
    collectives gloo_collectives.py; inside a node node_memory.py
    Megatron    a norm for sequence parallelism, the compiled dataset helper, a missing name
    TE          Megatron finds no Transformer Engine, and takes PyTorch's layers

Install before Megatron is imported: MONTA_CPU_RANKS=1 in the environment does so (autoload.py). It
applies to the thread that installs; a thread started by hand has to name the CPU itself.
"""

import copy
import functools
import importlib.metadata
import importlib.util
import logging
import os
import resource
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from monta_megatron.common.import_hook import after_import
from monta_megatron.emulation import gloo_collectives

# Compute capability of the device that Megatron sees: an A100's; it selects no kernel here.
_CAPABILITY = (8, 0)


@functools.cache
def install() -> None:
    """Let CPU ranks stand in for CUDA in this process; a second call does nothing.

    Where a GPU is available nothing is changed, and standard error says so.
    """
    if torch.cuda.is_available():
        _say("CPU ranks stay off, a GPU is available (CUDA_VISIBLE_DEVICES= hides it)")
        return
    # Megatron requires it for tensor parallelism below Blackwell (training/arguments.py).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # `jit_fuser` is torch.compile, which assumes a GPU and then fails to find its driver.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _install_device_queries()
    _install_streams()
    _install_generator()
    _install_device_mode()
    gloo_collectives.install()
    _hide_transformer_engine()
    for name in _WITHOUT_DEVICE:
        after_import(name, _leave_device_mode)
    after_import("megatron.core.transformer.torch_norm", _allow_sequence_parallel_norm)
    after_import("megatron.core.datasets.utils", _use_compiled_helper)
    after_import("megatron.core.transformer.moe.moe_utils", _name_te_general_gemm)
    _say("CPU ranks stand in for CUDA and Gloo for NCCL: numbers are right, times are a CPU's")


def _say(text: str) -> None:
    """One line on standard error, from rank 0; torchrun itself has no rank and prints nothing."""
    if os.environ.get("RANK") == "0":
        print(f"monta-megatron: {text}", file=sys.stderr, flush=True)


def _install_device_queries() -> None:
    """One device, with answers to all that Megatron asks before and during training."""
    vars(torch.cuda).update(
        is_available=lambda: True,  # initialize_megatron: "Megatron requires CUDA."
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        # torch's get_device_name and get_device_capability read these. Megatron asks while it
        # checks arguments (training/arguments.py) and, on its main branch, while it is imported
        # (ssm/ops/gdp).
        get_device_properties=lambda device=None: SimpleNamespace(
            name="CPU rank", major=_CAPABILITY[0], minor=_CAPABILITY[1]
        ),
        # Marks CUDA as initialised, so that torch.cuda seeds at once instead of deferring it.
        _initialized=True,
        # Once it has looked for a GPU, torch regards every later fork as broken.
        _is_in_bad_fork=lambda: False,
        # The process's resident memory is the device's (`report_memory`).
        memory_allocated=lambda device=None: _resident_bytes(),
        memory_reserved=lambda device=None: _resident_bytes(),
        max_memory_allocated=lambda device=None: _peak_resident_bytes(),
        max_memory_reserved=lambda device=None: _peak_resident_bytes(),
        empty_cache=lambda: None,
    )
    # A torch built for CUDA names CUDA as its accelerator even without a GPU; a DataLoader would
    # then pin memory on it.
    torch.accelerator.is_available = lambda: False


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _nothing(*arguments: Any, **options: Any) -> None:
    """Whatever was to be done or waited for has happened."""


class Stream:
    """A CUDA stream on which everything has run by the time the call returns."""

    __init__ = wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: "Event | None" = None) -> "Event":
        """The given event, or a new one."""
        return event or Event()


class Event:
    """A CUDA event; whatever it records has already happened."""

    __init__ = record = wait = synchronize = _nothing


def _install_streams() -> None:
    """Megatron uses streams in the dispatchers, the gradient buckets and the 1F1B schedules."""
    only_stream = Stream()
    vars(torch.cuda).update(
        Stream=Stream,
        Event=Event,
        stream=lambda stream: nullcontext(),
        current_stream=lambda device=None: only_stream,
        synchronize=lambda device=None: None,
        is_current_stream_capturing=lambda: False,
    )
    # A torch without CUDA has no NVTX, which Megatron 0.16's overlap schedule calls.
    vars(torch.cuda.nvtx).update(range_push=lambda message: 0, range_pop=lambda: 0)
    # It accepts torch's own streams only, so it is replaced here instead of in the mode below.
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign,assignment]


def _install_generator() -> None:
    """torch's CPU generator as the CUDA generator.

    Megatron's RNG tracker (tensor_parallel/random.py) keeps a state per name and swaps it in and
    out of the CUDA generator; dropout and initialisation then draw from it. On CPU tensors they
    draw from the CPU generator, so that is the one to swap.
    """
    torch.cuda.default_generators = (torch.default_generator,)
    vars(torch.cuda.random).update(current_device=lambda: 0)
    # The tracker warns if the CPU generator changes along with the CUDA generator.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in str(record.msg)
    )


# Functions of an exchange, stock's and ours, that name no device. The mode below searches each call
# of torch for one, in 2.5 us, which would make a dispatcher of many small calls look slow. Of a
# layer and micro-batch, forward and backward, it still sees about 130 of the 450 calls of stock's
# `alltoall`, and 70 to 120 of the 450 to 2,500 of our chains.
_WITHOUT_DEVICE = {
    "torch.distributed": (
        *("all_gather", "all_gather_into_tensor", "reduce_scatter"),
        *("all_to_all", "all_to_all_single"),
    ),
    "megatron.core.transformer.moe.moe_utils": ("permute", "unpermute", "sort_chunks_by_idxs"),
    "monta_megatron.exchange.executor": ("run",),
}


def _leave_device_mode(module: ModuleType) -> None:
    for name in _WITHOUT_DEVICE[module.__name__]:
        setattr(module, name, functools.partial(_without_device_mode, getattr(module, name)))


def _without_device_mode(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)


class _CpuForCuda(TorchFunctionMode):
    """Runs every torch function that names a CUDA device with the CPU in its place."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizers sort parameters by "torch.cuda.FloatTensor" and the like.
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.cpu or (
            func is torch.Tensor.to
            and any(_names(target, "cpu") for target in (*args, kwargs.get("device")))
        ):
            # A transfer from the device to the host has to copy: an asynchronous checkpoint is
            # written from the copy while training goes on with the tensor itself.
            copied = func(*args, **kwargs)
            return copied.clone() if copied is args[0] else copied
        if func is torch.Tensor.to:
            args = tuple("cpu" if _names_cuda(value) else value for value in args)
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def _names_cuda(argument: Any) -> bool:
    """Whether an argument means CUDA; torch.cuda.current_device() is a plain int."""
    return type(argument) is int or _names(argument, "cuda")


def _names(argument: Any, device_type: str) -> bool:
    return isinstance(argument, str | torch.device) and str(argument).startswith(device_type)


def _install_device_mode() -> None:
    mode = _CpuForCuda()
    mode.__enter__()
    # torch.autograd.backward is itself a torch function, and the mode is off inside it. Megatron
    # calls it in the backward of recomputed layers, and Python autograd functions run in it.
    run_backward = torch.autograd._engine_run_backward

    def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward_in_mode


def _hide_transformer_engine() -> None:
    """Make Transformer Engine unimportable, so that Megatron does without it.

    It imports and builds layers without a GPU, but its products of matrices refuse CPU tensors,
    even that of Megatron's router. None in `sys.modules` is Python's way of saying "not there".
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
        _say("Transformer Engine, which needs a GPU, is hidden from Megatron on CPU ranks")


def _allow_sequence_parallel_norm(torch_norm: ModuleType) -> None:
    """Let `WrappedTorchNorm` serve sequence parallelism, as the norms of Apex and TE do.

    Megatron refuses because torch's norms do not mark their weights; the mark is what makes
    `finalize_model_grads` sum the weights' gradients over the tensor-parallel ranks.
    """
    wrapped_norm = torch_norm.WrappedTorchNorm
    make_norm = wrapped_norm.__new__

    def make_marked_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = make_norm(cls, without, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    wrapped_norm.__new__ = staticmethod(make_marked_norm)


def _use_compiled_helper(datasets_utils: ModuleType) -> None:
    """Keep training/initialize.py from compiling the dataset helper if it is compiled already.

    A Megatron-LM checkout ships only the source, and compiling it writes into the checkout and
    needs pybind11. An installed megatron-core wheel has the same helper compiled.
    """
    datasets = importlib.import_module("megatron.core.datasets")
    with suppress(importlib.metadata.PackageNotFoundError):
        wheel = importlib.metadata.distribution("megatron-core")
        datasets.__path__.append(str(wheel.locate_file("megatron/core/datasets")))
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        datasets_utils.compile_helpers = lambda: None  # type: ignore[attr-defined]


def _name_te_general_gemm(moe_utils: ModuleType) -> None:
    """Define the name that megatron-core 0.16's router uses, as later releases do.

    Without Transformer Engine its import leaves `te_general_gemm` undefined, and
    `RouterGatingLinearFunction` raises NameError; None sends it down the torch path.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
