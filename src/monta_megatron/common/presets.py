"""Presets of `configs/`, extras of setup.py, and provenance: versions, machine, commit.

No index holds this package yet, so no message may tell pip to fetch it by name: whoever takes that
name could answer. The packages of an extra can be installed wherever this package came from.
"""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Literal

from monta_megatron.common.text import advice, same_name

PresetKind = Literal["models", "clusters", "runs"]

CONFIG = "config.json"

# setup.py puts the checkout's folder into the package of a wheel.
_IN_WHEEL, _IN_CHECKOUT = (
    Path(__file__).parents[1] / "configs",
    Path(__file__).parents[3] / "configs",
)
FOLDER = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CHECKOUT


def find(kind: PresetKind, given: str | Path, folder: str | Path = "") -> Path:
    """The file that a user means: an existing path, or else the name of a preset.

    For a model it may be a folder as well, of Hugging Face, whose `config.json` is meant.

    Args:
        kind: folder of `configs/`, such as "models".
        given: the path or the name, whatever its case, `-` or `_`, with its owner or without.
        folder: what a relative path is relative to; the working folder by default.

    Raises:
        ValueError: there is neither; the message names the preset that was probably meant.
    """
    path = Path(folder, given)
    config = path / CONFIG
    if kind == "models" and config.is_file():
        return config
    presets = {preset.stem: preset for preset in sorted((FOLDER / kind).glob("*.yaml"))}
    name = same_name(str(given), presets)
    if not path.is_file() and name is not None and (str(given) in presets or not path.exists()):
        return presets[name]
    if not path.exists():
        known = advice(path.stem, presets)
        raise ValueError(
            f"{path}: cannot be read: No such file or directory, nor a preset; {known}"
        )
    if path.is_dir():
        without = f" without {CONFIG}" if kind == "models" else ""
        raise ValueError(f"{path}: cannot be read: is a folder{without}")
    return path


LIBRARIES = {"te": ("transformer-engine[pytorch]",), "plot": ("matplotlib",)}


def install(extra: str) -> str:
    """The command that installs the libraries of an extra, from a checkout and a wheel alike."""
    quoted = (f"'{library}'" if "[" in library else library for library in LIBRARIES[extra])
    return f"pip install {' '.join(quoted)}"


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
