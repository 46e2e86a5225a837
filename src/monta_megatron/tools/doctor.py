"""Report of `monta doctor`: versions, the way into Megatron, devices, variables, nodes."""

import importlib.util
import os
import platform
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from monta_megatron.common import __version__, presets
from monta_megatron.common.presets import version_of
from monta_megatron.common.tables import WIDTH, table

WITH_TRAINING = "pip install 'megatron-core[training]'"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: of the check.
        status: "ok", "note" (works, but worth knowing) or "missing".
        found: what is there.
        advice: what to do about it, or None.
    """

    name: str
    status: Literal["ok", "note", "missing"]
    found: str
    advice: str | None = None


def _python() -> Iterator[Finding]:
    yield Finding("monta-megatron", "ok", __version__)
    yield Finding("python", "ok", platform.python_version())


def _torch() -> Iterator[Finding]:
    import torch

    yield Finding("torch", "ok", torch.__version__)


def _megatron() -> Iterator[Finding]:
    from monta_megatron.integration.supported_settings import (
        OVERRIDE_VARIABLE,
        SUPPORTED,
        is_supported,
    )

    name = "megatron-core"
    supported = " to <".join(".".join(map(str, bound)) for bound in SUPPORTED)
    wanted = f"{WITH_TRAINING} (supported: {supported})"
    try:
        from megatron.core.package_info import __version__ as version
    except ImportError as error:
        yield Finding(name, "missing", f"cannot be imported: {error}", wanted)
        return
    if is_supported(version):
        yield Finding(name, "ok", version)
        yield _optional("megatron.training", WITH_TRAINING)
        yield _optional("transformer_engine", f"{presets.install('te')} (needs CUDA)")
    else:
        yield Finding(
            name,
            "note" if os.environ.get(OVERRIDE_VARIABLE) == "1" else "missing",
            f"{version}, outside the supported range",
            f"{wanted}, or {OVERRIDE_VARIABLE}=1 to go on",
        )


def _optional(module_name: str, advice: str) -> Finding:
    if importlib.util.find_spec(module_name) is None:
        return Finding(module_name, "note", "not installed", advice)
    # A part of a package has no version.
    return Finding(module_name, "ok", version_of(module_name.replace("_", "-")) or "found")


def _way_in() -> Iterator[Finding]:
    from monta_megatron.integration.registration import ways_in

    active = ", ".join(ways_in())
    if not active:
        yield Finding(
            "way in",
            "note",
            "none is active in this process",
            "unset MONTA_AUTOLOAD and TORCH_DEVICE_BACKEND_AUTOLOAD, or call "
            "monta_megatron.register() before Megatron parses its arguments",
        )
        return
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = str(TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"].type)
    if "monta" in names:
        yield Finding("way in", "ok", f"{active}: Megatron knows 'monta'")
    else:
        yield Finding("way in", "missing", f"{active}, but Megatron does not know it")


def _accelerator() -> Iterator[Finding]:
    import torch

    from monta_megatron.emulation import cpu_ranks

    name = "accelerator"
    if os.environ.get("MONTA_CPU_RANKS") == "1":
        yield Finding(name, "note", f"CPU ranks stand in ({cpu_ranks.__name__})")
    elif not torch.cuda.is_available():
        yield Finding(name, "note", "no GPU", "MONTA_CPU_RANKS=1 runs Megatron on CPU ranks")
    else:
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding(name, "ok", f"{gpus}, NCCL {nccl}")


def _kernels() -> Iterator[Finding]:
    import torch

    if not torch.accelerator.is_available():
        return
    from monta_megatron.exchange.kernel_choice import kernel_problem

    problem = kernel_problem("cuda")
    if problem:
        yield Finding(
            "Triton kernels",
            "note",
            f"PyTorch's operations run instead, to the same bits: {problem}",
            "a container needs triton, a C compiler (gcc) and Python.h (python3-dev)",
        )
    else:
        yield Finding("Triton kernels", "ok", "can be built")


def _private_names() -> Iterator[Finding]:
    from monta_megatron.common.torch_private import has_async_option

    held = "has" if has_async_option() else "has not (it is always so there)"
    yield Finding("torch's AllToAllOptions", "ok", f"{held} asyncOp")


def _launch_queues() -> Iterator[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = os.environ.get(name)
    if value != "1":
        queues = f"{value} launch queues" if value else "not set (8 launch queues)"
        yield Finding(name, "ok", queues)
        return
    yield Finding(
        name,
        "note",
        "1 launch queue: chains overlap all the same, but shared experts and the other "
        "micro-batch of the 1F1B overlap wait until a chain's waits are over",
        "Megatron demands it before Blackwell for TP or CP > 1, but not with "
        "--overlap-moe-expert-parallel-comm (1 or 32) or FSDP (not 1); elsewhere leave it "
        "unset or set 32",
    )


def _launch_order() -> Iterator[Finding]:
    from monta_megatron.common.launch_order import VARIABLE, is_useful

    value = os.environ.get(VARIABLE)
    useful, by = is_useful()
    if value is None:
        found = (
            "a training with monta sets 1" if useful else "nor does a training with monta set it"
        )
        yield Finding(VARIABLE, "ok" if useful else "note", f"not set; {found}: {by}")
        return
    advice = (
        "1 starts the operations of all communicators in one order, so that they cannot deadlock"
    )
    is_set = value == "1"
    found = f"{value}, set by the user: {by}"
    yield Finding(VARIABLE, "ok" if is_set else "note", found, None if is_set else advice)


def _topology() -> Iterator[Finding]:
    from monta_megatron.common.nodes import is_named, node_here
    from monta_megatron.common.ranks import ranks_per_node_from_launcher

    if is_named():
        yield Finding("node", "ok", f"{node_here()}, by MONTA_NODE")
    elif (ranks_per_node := ranks_per_node_from_launcher()) is not None:
        yield Finding("ranks per node", "ok", str(ranks_per_node))
    else:
        yield Finding(
            "ranks per node",
            "note",
            "not known outside a launch",
            "a cluster file or the launcher tells it; --moe-monta-ranks-per-node overrides",
        )


CHECKS = (
    _python,
    _torch,
    _megatron,
    _way_in,
    _accelerator,
    _kernels,
    _private_names,
    _launch_queues,
    _launch_order,
    _topology,
)


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
        """A table."""
        return table((">status", "what", "found"), self._rows())

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        """A row for each finding, or several where its text is long."""
        names = (len(finding.name) for finding in self.findings)
        width = WIDTH - len("missing") - max(names) - len("    ")
        for finding in self.findings:
            first: tuple[str, str] = (finding.status, finding.name)
            text = "; ".join(filter(None, (finding.found, finding.advice)))
            for line in textwrap.wrap(text, width, break_on_hyphens=False):
                yield (*first, line)
                first = ("", "")


def examine() -> DoctorReport:
    """Look at everything; a check that fails is a finding, not an exception."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            # When imported, Megatron warns about what is missing; the report says that itself.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                findings.extend(check())
        except Exception as error:  # noqa: BLE001 - a broken installation is what this is for
            name = check.__name__.strip("_")
            findings.append(Finding(name, "missing", f"{type(error).__name__}: {error}"))
    return DoctorReport(findings=tuple(findings))
