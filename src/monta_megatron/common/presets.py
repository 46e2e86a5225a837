"""Presets of `configs/`, and provenance: versions, machine, commit."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Literal

from monta_megatron.common.text import advice

PresetKind = Literal["models", "clusters", "runs"]

CONFIG = "config.json"

# setup.py puts the checkout's folder into the package of a wheel.
_IN_WHEEL, _IN_CHECKOUT = (Path(__file__).parents[up] / "configs" for up in (1, 3))
FOLDER = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CHECKOUT


def find(kind: PresetKind, given: str | Path, folder: str | Path = "") -> Path:
    """The file that a user means: an existing path, or else the name of a preset.

    For a model it may be a folder as well, of Hugging Face, whose `config.json` is meant.

    Args:
        kind: folder of `configs/`, such as "models".
        given: the path or the name, as in "qwen3_30b_a3b" or "Qwen/Qwen3-30B-A3B".
        folder: what a relative path is relative to; the working folder by default.

    Raises:
        ValueError: there is neither; the message names the preset that was probably meant.
    """
    path = Path(folder, given)
    if kind == "models" and (path / CONFIG).is_file():
        return path / CONFIG
    if path.exists() and not path.is_dir():
        return path
    presets = {preset.stem: preset for preset in sorted((FOLDER / kind).glob("*.yaml"))}
    name = Path(given).name.casefold().replace("-", "_")
    if name in presets:
        return presets[name]
    if path.is_dir():
        without = f" without {CONFIG}" if kind == "models" else ""
        raise ValueError(f"{path}: cannot be read: is a folder{without}")
    known = advice(Path(name).stem, presets)
    raise ValueError(f"{path}: cannot be read: No such file or directory, nor a preset; {known}")


PACKAGES = ("monta-megatron", "megatron-core", "torch", "numpy")


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages involved; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    # Takes a tenth of the time of a plan.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """This rank's machine; the others are assumed to be the same."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(names, platform.machine()),
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
