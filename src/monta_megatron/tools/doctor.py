"""Report of `monta doctor`: versions, the way into Megatron, devices, variables, options."""

import argparse
import importlib.util
import os
import platform
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

from monta_megatron.common import __version__
from monta_megatron.common.files import version_of
from monta_megatron.common.text import WIDTH, table
from monta_megatron.common.text import advice as nearest_of

WITH_TRAINING = "pip install 'megatron-core[training]'"
INSTALL_TE = "pip install 'transformer-engine[pytorch]'"
# 0 turns off the loading of all packages that extend torch, or of ours alone.
AUTOLOAD_VARIABLES = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "MONTA_AUTOLOAD")


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


def _versions() -> Iterator[Finding]:
    import torch

    yield Finding("monta-megatron", "ok", __version__)
    yield Finding("python", "ok", platform.python_version())
    yield Finding("torch", "ok", torch.__version__)


def _megatron() -> Iterator[Finding]:
    from monta_megatron.integration import supported_settings as settings

    name = "megatron-core"
    supported = " to <".join(".".join(map(str, bound)) for bound in settings.SUPPORTED)
    wanted = f"{WITH_TRAINING} (supported: {supported})"
    try:
        from megatron.core.package_info import __version__ as version
    except ImportError as error:
        yield Finding(name, "missing", f"cannot be imported: {error}", wanted)
        return
    if not settings.is_supported(version):
        is_allowed = os.environ.get(settings.OVERRIDE_VARIABLE) == "1"
        found = f"{version}, outside the supported range"
        advice = f"{wanted}, or {settings.OVERRIDE_VARIABLE}=1 to go on"
        yield Finding(name, "note" if is_allowed else "missing", found, advice)
        return
    yield Finding(name, "ok", version)
    yield _optional("megatron.training", WITH_TRAINING)
    yield _optional("transformer_engine", INSTALL_TE if _has_gpu() else None)


def _optional(module_name: str, advice: str | None) -> Finding:
    if importlib.util.find_spec(module_name) is None:
        return Finding(module_name, "note" if advice else "ok", "not installed", advice)
    # A part of a package has no version.
    return Finding(module_name, "ok", version_of(module_name.replace("_", "-")) or "found")


def _way_in() -> Iterator[Finding]:
    from monta_megatron.integration.registration import ways_in

    active = ", ".join(ways_in())
    if not active:
        found = "none is active: Megatron's parser knows neither 'monta' nor --moe-monta-..."
        off = [name for name in AUTOLOAD_VARIABLES if os.environ.get(name) == "0"]
        advice = "install the package, which on PYTHONPATH alone has no entry point"
        if off:
            advice = f"unset {' and '.join(off)}, or call monta_megatron.register() before it"
        yield Finding("way in", "note", found, advice)
        return
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = str(TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"].type)
    if "monta" in names:
        yield Finding("way in", "ok", f"{active}: Megatron knows 'monta'")
    else:
        yield Finding("way in", "missing", f"{active}, but Megatron does not know it")


def _has_gpu() -> bool:
    import torch

    # On CPU ranks `torch.cuda.is_available` is true.
    return torch.accelerator.is_available()


def _accelerator() -> Iterator[Finding]:
    import torch

    from monta_megatron.exchange.kernels import kernel_problem

    if not _has_gpu():
        is_set = os.environ.get("MONTA_CPU_RANKS") == "1"
        advice = None if is_set else "MONTA_CPU_RANKS=1 runs Megatron on CPU ranks"
        found = "CPU ranks stand in for GPUs" if is_set else "no GPU"
        yield Finding("accelerator", "note", found, advice)
        return
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    yield Finding("accelerator", "ok", gpus)
    if problem := kernel_problem("cuda"):
        found = f"PyTorch's operations run instead, to the same bits: {problem}"
        advice = "install triton, a C compiler (gcc) and Python.h (python3-dev)"
        yield Finding("Triton kernels", "note", found, advice)
    else:
        yield Finding("Triton kernels", "ok", "can be built")


def _communicators() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    from monta_megatron.common.launch_order import VARIABLE, is_useful

    has_nccl = dist.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "not in this torch"
    yield Finding("NCCL", "ok", version)

    value = os.environ.get(VARIABLE)
    useful, by = is_useful()
    if value is None:
        found = f"not set; a training with monta {'sets 1' if useful else 'leaves it so'}: {by}"
        yield Finding(VARIABLE, "ok" if useful or not _has_gpu() else "note", found)
    else:
        advice = "1 starts operations of all communicators in one order: none can deadlock"
        found = f"{value}, set by the user: {by}"
        is_on = value == "1"
        yield Finding(VARIABLE, "ok" if is_on else "note", found, None if is_on else advice)

    queues = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = os.environ.get(queues)
    if value == "1" and _has_gpu():
        found = "1: shared experts and the other micro-batch of the 1F1B overlap wait for a chain"
        advice = (
            "unset it or set 32, unless Megatron demands 1: before Blackwell at TP or CP > 1, "
            "without --overlap-moe-expert-parallel-comm and FSDP"
        )
        yield Finding(queues, "note", found, advice)
    else:
        yield Finding(queues, "ok", value or "not set (8 launch queues)")


def _options(words: Sequence[str]) -> Iterator[Finding]:
    """Options in force, each by its flag, its variable or its default."""
    from monta_megatron.integration.options import KINDS, SWITCH, Options, defaults_from_environment

    flags = {f"--moe-monta-{name.replace('_', '-')}": kind for name, kind in KINDS.items()}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, kind in flags.items():
        if kind is SWITCH:
            parser.add_argument(flag, action="store_true", default=None)
        else:
            parser.add_argument(flag, type=kind.read)
    variables = defaults_from_environment()
    try:
        parsed, unknown = parser.parse_known_args(words)
        for word in unknown:
            if word.startswith("--moe-monta-"):
                raise ValueError(f"{word}: unknown; {nearest_of(word, flags)}")
        given = {name: value for name, value in vars(parsed).items() if value is not None}
        options = Options.of(SimpleNamespace(**variables | given))
    except (ValueError, argparse.ArgumentError) as error:
        yield Finding("options", "missing", str(error))
        return
    for flag, name in zip(flags, variables, strict=True):
        default = ("default", getattr(options, name.removeprefix("moe_monta_")))
        sources = (("flag", given.get(name)), (name.upper(), variables[name]))
        source, value = next((each for each in sources if each[1] is not None), default)
        yield Finding(flag, "ok", f"{'not set' if value is None else value}, by {source}")


CHECKS = (_versions, _megatron, _way_in, _accelerator, _communicators)


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
        rows = []
        names = (len(finding.name) for finding in self.findings)
        width = WIDTH - len("missing") - max(names) - len("    ")
        for finding in self.findings:
            first: tuple[str, str] = (finding.status, finding.name)
            text = "; ".join(filter(None, (finding.found, finding.advice)))
            for line in textwrap.wrap(text, width, break_on_hyphens=False):
                rows.append((*first, line))
                first = ("", "")
        return table((">status", "what", "found"), rows)


def examine(words: Sequence[str] = ()) -> DoctorReport:
    """Look at everything; a check that fails is a finding, not an exception.

    Args:
        words: arguments of Megatron, for the options.
    """
    findings: list[Finding] = []
    for check in (*CHECKS, partial(_options, words)):
        try:
            # When imported, Megatron warns about what is missing; the report says that itself.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                findings.extend(check())
        except Exception as error:  # noqa: BLE001 - a broken installation is what this is for
            name = getattr(check, "__name__", "options").strip("_")
            findings.append(Finding(name, "missing", f"{type(error).__name__}: {error}"))
    return DoctorReport(findings=tuple(findings))
