"""`monta doctor`: what is installed, which way in is active, what is missing and how to get it."""

import argparse
import json
import os
import platform
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from monta_megatron.cli.output import add_json
from monta_megatron.common import extras
from monta_megatron.common.tables import table

WIDTH = 80


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: "ok", "note" (works, but worth knowing) or "missing".
        found: what was found.
        advice: what to do about it, or None.
    """

    name: str
    status: Literal["ok", "note", "missing"]
    found: str
    advice: str | None = None


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation",
        description="Check what is installed, which way into Megatron is active, what is missing.",
        epilog="example: monta doctor --json",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print the report; exit status 1 if something is missing."""
    findings = examine()
    if parsed.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(table((">status", "what", "found"), _rows(findings)))
    return int(any(finding.status == "missing" for finding in findings))


def _rows(findings: list[Finding]) -> Iterator[tuple[str, str, str]]:
    """A row for each finding, or several where its text is long."""
    width = WIDTH - len("missing") - max(len(entry.name) for entry in findings) - len("    ")
    for entry in findings:
        head: tuple[str, str] = (entry.status, entry.name)
        text = "; ".join(filter(None, (entry.found, entry.advice)))
        for line in textwrap.wrap(text, width, break_on_hyphens=False):
            yield (*head, line)
            head = ("", "")


def examine() -> list[Finding]:
    """Look at everything; a check that fails is a finding, not an exception."""
    findings: list[Finding] = []
    for check in (
        _python,
        _torch,
        _megatron,
        _way_in,
        _accelerator,
        _launch_queues,
        _communicators,
        _topology,
    ):
        try:
            # When imported, Megatron warns about what is missing; the report says that itself.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                findings.extend(check())
        except Exception as error:  # noqa: BLE001 - a broken installation is what this is for
            findings.append(
                Finding(check.__name__.strip("_"), "missing", f"{type(error).__name__}: {error}")
            )
    return findings


def _python() -> list[Finding]:
    from monta_megatron import __version__

    return [
        Finding("monta-megatron", "ok", __version__),
        Finding("python", "ok", platform.python_version()),
    ]


def _torch() -> list[Finding]:
    import torch

    return [Finding("torch", "ok", torch.__version__)]


def _megatron() -> list[Finding]:
    from monta_megatron.integration.versions import OVERRIDE_VARIABLE, SUPPORTED, is_supported

    supported = " to <".join(".".join(map(str, bound)) for bound in SUPPORTED)
    wanted = f"pip install 'megatron-core[training]' (supported: {supported})"
    try:
        from megatron.core.package_info import __version__ as version
    except ImportError as error:
        return [Finding("megatron-core", "missing", f"cannot be imported: {error}", wanted)]
    if not is_supported(version):
        overridden = os.environ.get(OVERRIDE_VARIABLE) == "1"
        return [
            Finding(
                "megatron-core",
                "note" if overridden else "missing",
                f"{version}, outside the supported range",
                f"{wanted}, or {OVERRIDE_VARIABLE}=1 to go on",
            )
        ]
    findings = [Finding("megatron-core", "ok", version)]
    findings.append(_optional("megatron.training", "pip install 'megatron-core[training]'"))
    findings.append(_optional("transformer_engine", f"{extras.install('te')} (needs CUDA)"))
    return findings


def _optional(module_name: str, advice: str) -> Finding:
    import importlib.util

    if importlib.util.find_spec(module_name) is None:
        return Finding(module_name, "note", "not installed", advice)
    try:
        found = importlib.metadata.version(module_name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        found = "found"
    return Finding(module_name, "ok", found)


def _way_in() -> list[Finding]:
    from monta_megatron.integration.registration import ways_in

    active = ways_in()
    if not active:
        return [
            Finding(
                "way in",
                "note",
                "none is active in this process",
                "unset MONTA_AUTOLOAD and TORCH_DEVICE_BACKEND_AUTOLOAD, or call "
                "monta_megatron.register() before Megatron parses its arguments",
            )
        ]
    from megatron.core.transformer.transformer_config import TransformerConfig

    choices = str(TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"].type)
    if "monta" not in choices:
        return [Finding("way in", "missing", f"{', '.join(active)}, but Megatron does not know it")]
    return [Finding("way in", "ok", f"{', '.join(active)}: Megatron knows 'monta'")]


def _accelerator() -> list[Finding]:
    import torch

    from monta_megatron.emulation import cpu_ranks

    if os.environ.get("MONTA_CPU_RANKS") == "1":
        return [Finding("accelerator", "note", f"CPU ranks stand in ({cpu_ranks.__name__})")]
    if not torch.cuda.is_available():
        return [
            Finding("accelerator", "note", "no GPU", "MONTA_CPU_RANKS=1 runs Megatron on CPU ranks")
        ]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [
        Finding(
            "accelerator",
            "ok",
            f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, NCCL {nccl}",
        )
    ]


def _launch_queues() -> list[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = os.environ.get(name)
    if value != "1":
        queues = f"{value} launch queues" if value else "not set (8 launch queues)"
        return [Finding(name, "ok", queues)]
    return [
        Finding(
            name,
            "note",
            "1 launch queue: chains overlap all the same, but shared experts and the other "
            "micro-batch of the 1F1B overlap wait for a chain's waits",
            "Megatron demands it before Blackwell for TP or CP > 1, but not with "
            "--overlap-moe-expert-parallel-comm (1 or 32) or FSDP (not 1); elsewhere leave it "
            "unset or set 32",
        )
    ]


def _communicators() -> list[Finding]:
    from monta_megatron.chains.communicators import DEFAULT_MAX_CTAS

    budget = os.environ.get("MOE_MONTA_MAX_CTAS") or DEFAULT_MAX_CTAS
    finding = Finding(
        "communicators",
        "ok",
        f"at most {budget} SMs for a rail and for a node, where neither --moe-monta-max-ctas nor "
        "--nccl-communicator-config-path says otherwise",
    )
    if "NCCL_MAX_CTAS" in os.environ:
        finding = Finding(
            "communicators",
            "note",
            f"at most {os.environ['NCCL_MAX_CTAS']} SMs for any, by NCCL_MAX_CTAS",
            "unset it, so that --moe-monta-max-ctas holds for rails and nodes",
        )
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    value = os.environ.get(name)
    if value == "1":
        return [finding, Finding(name, "ok", "1: communicators cannot wait for each other")]
    return [
        finding,
        Finding(
            name,
            "note",
            value or "not set",
            "1 lets NCCL >= 2.26 start the operations of several communicators in the order in "
            "which they were issued, so that they cannot deadlock",
        ),
    ]


def _topology() -> list[Finding]:
    from monta_megatron.chains.nodes import is_named, node_here
    from monta_megatron.common.this_rank import ranks_per_node_from_launcher

    if is_named():
        return [Finding("node", "ok", f"{node_here()}, by MONTA_NODE")]
    ranks_per_node = ranks_per_node_from_launcher()
    if ranks_per_node is None:
        return [
            Finding(
                "ranks per node",
                "note",
                "not known outside a launch",
                "a cluster file or the launcher tells it; --moe-monta-ranks-per-node overrides",
            )
        ]
    return [Finding("ranks per node", "ok", str(ranks_per_node))]
