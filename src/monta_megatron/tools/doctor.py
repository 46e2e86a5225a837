"""Report of `monta doctor`: versions, the way into Megatron, devices, variables."""

import importlib.util
import os
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from monta_megatron.common import __version__
from monta_megatron.common.errors import UserError
from monta_megatron.common.files import version_of
from monta_megatron.common.text import WIDTH, table

WITH_TRAINING = "pip install 'megatron-core[training]'"
INSTALL_TE = "pip install 'transformer-engine[pytorch]'"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
# 0 turns off the loading of all packages that extend torch, or of ours alone.
AUTOLOAD_VARIABLES = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "MONTA_AUTOLOAD")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: name of the check.
        status: "ok", "note" (works, but worth knowing) or "missing".
        found: description of what was found.
        advice: remedy, or None.
    """

    name: str
    status: Literal["ok", "note", "missing"]
    found: str
    advice: str | None = None


def _versions() -> Iterator[Finding]:
    import torch

    yield Finding("monta-megatron", "ok", __version__)
    yield Finding("python", "ok", sys.version.partition(" ")[0])
    yield Finding("torch", "ok", torch.__version__)


def _megatron() -> Iterator[Finding]:
    from monta_megatron.integration.supported_settings import check_megatron_version, is_supported

    try:
        check_megatron_version()
        from megatron.core.package_info import __version__ as version
    except ImportError as error:
        yield Finding("megatron-core", "missing", f"cannot be imported: {error}", WITH_TRAINING)
    except UserError as error:
        yield Finding("megatron-core", "missing", str(error))
    else:
        outside = "" if is_supported(version) else ", outside of the supported range"
        yield Finding("megatron-core", "note" if outside else "ok", f"{version}{outside}")
        yield _optional("megatron.training", WITH_TRAINING)
        yield _optional("transformer_engine", INSTALL_TE if _has_gpu() else None)


def _optional(module_name: str, advice: str | None) -> Finding:
    if importlib.util.find_spec(module_name) is None:
        found = "hidden from CPU ranks" if module_name in sys.modules else "not installed"
        if advice is None:
            found += ", and not needed without a GPU"
        return Finding(module_name, "note" if advice else "ok", found, advice)
    # A part of a package has no version.
    return Finding(module_name, "ok", version_of(module_name.replace("_", "-")) or "found")


def _way_in() -> Iterator[Finding]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from monta_megatron.integration.registration import ways_in

    active = ", ".join(ways_in())
    if not active:
        found = "none is active: Megatron's parser knows neither 'monta' nor --moe-monta-..."
        off = [name for name in AUTOLOAD_VARIABLES if os.environ.get(name) == "0"]
        advice = "install the package, which on PYTHONPATH alone has no entry point"
        if off:
            advice = f"unset {' and '.join(off)}, or call monta_megatron.register() in the script"
        yield Finding("way in", "note", found, advice)
    elif "moe_monta_chain" in TransformerConfig.__dataclass_fields__:
        yield Finding("way in", "ok", f"{active}: Megatron knows 'monta'")
    else:
        yield Finding("way in", "missing", f"{active}, but Megatron does not know it")


def _has_gpu() -> bool:
    import torch

    # On CPU ranks `torch.cuda.is_available` is true.
    return torch.accelerator.is_available()


def _accelerator() -> Iterator[Finding]:
    from torch import cuda

    from monta_megatron.exchange.kernels import kernel_problem

    if not _has_gpu():
        if os.environ.get("MONTA_CPU_RANKS") == "1":
            yield Finding("accelerator", "note", "CPU ranks stand in for GPUs")
        else:
            yield Finding("accelerator", "note", "no GPU", "MONTA_CPU_RANKS=1 trains on CPU ranks")
        return
    yield Finding("accelerator", "ok", f"{cuda.device_count()} x {cuda.get_device_name(0)}")
    if problem := kernel_problem("cuda"):
        found = f"PyTorch's operations run instead, to the same bits: {problem}"
        advice = "install triton, a C compiler (gcc) and Python.h (python3-dev)"
        yield Finding("Triton kernels", "note", found, advice)
    else:
        yield Finding("Triton kernels", "ok", "can be built")


def _communicators() -> Iterator[Finding]:
    import torch

    from monta_megatron.exchange.launch_order import VARIABLE, is_useful

    has_nccl = torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "not in this torch"
    yield Finding("NCCL", "ok", version)

    useful, by = is_useful()
    value = os.environ.get(VARIABLE)
    if value is None:
        found = f"not set; a training with monta {'sets 1' if useful else 'leaves it so'}: {by}"
        yield Finding(VARIABLE, "ok" if useful or not _has_gpu() else "note", found)
    else:
        advice = "with 1, collectives of different groups overlap, and none can deadlock"
        text = f"{value}, set by the user: {by}"
        is_on = value == "1"
        yield Finding(VARIABLE, "ok" if is_on else "note", text, None if is_on else advice)

    value = os.environ.get(QUEUES)
    if value == "1" and _has_gpu():
        found = "1: shared experts and the other micro-batch of the 1F1B overlap wait for a chain"
        advice = "unset it or set 32 where Megatron does not demand 1 (docs/troubleshooting.md)"
        yield Finding(QUEUES, "note", found, advice)
    else:
        yield Finding(QUEUES, "ok", value or "not set (8 launch queues)")


@dataclass(frozen=True)
class DoctorReport:
    """Report on the installation and the machine."""

    findings: tuple[Finding, ...]

    @property
    def lacks_something(self) -> bool:
        """Whether something is missing."""
        return any(finding.status == "missing" for finding in self.findings)

    def document(self) -> list[dict[str, Any]]:
        """The findings for JSON."""
        return [asdict(finding) for finding in self.findings]

    def text(self) -> str:
        """A table; a long text takes several lines."""
        rows: list[tuple[str, str, str]] = []
        names = (len(finding.name) for finding in self.findings)
        width = WIDTH - len("missing") - max(names) - len("    ")
        for finding in self.findings:
            text = "; ".join(filter(None, (finding.found, finding.advice)))
            first, *rest = textwrap.wrap(text, width, break_on_hyphens=False)
            rows += [(finding.status, finding.name, first), *(("", "", line) for line in rest)]
        return table((">status", "what", "found"), rows)


def examine() -> DoctorReport:
    """Run all checks; a check that fails is a finding, not an exception."""
    findings: list[Finding] = []
    for check in (_versions, _megatron, _way_in, _accelerator, _communicators):
        try:
            # When imported, Megatron warns about what is missing; the report says that itself.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                findings.extend(check())
        except Exception as error:  # noqa: BLE001 - a broken installation is what this is for
            name = check.__name__.strip("_")
            findings.append(Finding(name, "missing", f"{type(error).__name__}: {error}"))
    return DoctorReport(findings=tuple(findings))
