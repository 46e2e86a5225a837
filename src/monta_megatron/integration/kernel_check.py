"""At the first use of a device: each Triton kernel gives what PyTorch operations give there.

A file in the user's cache folder says what was found well, by version and device, so that a machine
is checked once. Without it, or where it is damaged, kernels are compared again.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from monta_megatron.common.files import cache_folder, make_folder, write_whole
from monta_megatron.common.presets import version_of
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.exchange.kernel_choice import is_fused
from monta_megatron.integration.self_check import end_if_any

# What was checked in this process, by group.
_checked_kernels: set[tuple[dist.ProcessGroup, str]] = set()


def check_kernels(dispatcher: Any, device: torch.device) -> None:
    """Compare the kernels with PyTorch operations, unless that was done here before.

    All ranks of the exchange call it at the same place, and wait for each other.

    Args:
        dispatcher: a MontaTokenDispatcher, whose rows' size and dtype are taken.
        device: of the rows.

    Raises:
        SelfCheckError: a kernel differs on a rank of the exchange.
    """
    group, hidden_size = dispatcher.tp_ep_group, dispatcher.hidden_shape[-1]
    dtype = dispatcher.config.params_dtype
    identity = _identity(device, hidden_size, dtype)
    if (group, identity) in _checked_kernels:
        return
    difference = ""
    if is_fused(dispatcher.options.kernels, device.type):
        difference = _difference(identity, device, hidden_size, dtype)
    advice = "Report it, and train with moe_monta_kernels torch"
    what = "Triton kernels do not give what PyTorch's operations give"
    end_if_any(gather_objects(difference, group), group, what, advice)
    _checked_kernels.add((group, identity))


def _identity(device: torch.device, hidden_size: int, dtype: torch.dtype) -> str:
    versions = ", ".join(
        f"{package} {version_of(package)}" for package in ("monta-megatron", "triton", "torch")
    )
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return f"{versions}, {name} ({capability}), hidden size {hidden_size}, {dtype}"


def _difference(identity: str, device: torch.device, hidden_size: int, dtype: torch.dtype) -> str:
    """The first difference, "" if there is none, or was none before."""
    path = _path(identity)
    if _is_known(path, identity):
        return ""
    from monta_megatron.exchange.kernels.check import first_difference

    difference = first_difference(device, hidden_size, dtype)
    if not difference:
        try:
            make_folder(path.parent, "the cache folder")
            write_whole(path, json.dumps({"checked": identity}))
        except ValueError as error:
            _say(f"Triton kernels are compared again by the next run: {error}")
    return difference


def _path(identity: str) -> Path:
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return cache_folder() / "kernels" / f"{name}.json"


def _is_known(path: Path, identity: str) -> bool:
    try:
        if json.loads(path.read_text(encoding="utf-8")) == {"checked": identity}:
            return True
        problem = "it says something else"
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        problem = str(error)
    _say(f"Triton kernels are compared again, as {path} cannot be used: {problem}")
    return False


def _say(line: str) -> None:
    logging.getLogger(__name__).warning("%s", line)
