"""Where a result comes from: versions, machine, commit. No torch."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("monta-megatron", "megatron-core", "torch", "numpy")


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages involved; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """This rank's machine; the others are assumed to be the same."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
    }


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit of a source folder, "-dirty" where it was changed; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
