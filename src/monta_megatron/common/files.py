"""Files that a user names, presets of `configs/`, files written whole, and their provenance."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from monta_megatron.common.errors import UserError
from monta_megatron.common.text import advice

ConfigKind = Literal["models", "clusters", "runs"]

# setup.py puts the checkout's folder into the package of a wheel.
_IN_WHEEL, _IN_CHECKOUT = (Path(__file__).parents[up] / "configs" for up in (1, 3))
CONFIGS = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CHECKOUT


def find_config(kind: ConfigKind, given: str | Path, folder: str | Path = "") -> Path:
    """The file that a user means: an existing path, or else the name of a preset.

    For a model it may be a folder as well, of Hugging Face, whose `config.json` is meant.

    Args:
        kind: folder of `configs/`, such as "models".
        given: the path or the name, as in "qwen3_30b_a3b" or "Qwen3-30B-A3B". A name on a hub, as
            in "Qwen/Qwen3-30B-A3B", is refused: nothing is downloaded.
        folder: what a relative path is relative to; the working folder by default.

    Raises:
        UserError: there is neither; the message names the preset that was probably meant.
    """
    path = Path(folder, given)
    if kind == "models" and (path / "config.json").is_file():
        return path / "config.json"
    if path.exists() and not path.is_dir():
        return path
    presets = {preset.stem: preset for preset in sorted((CONFIGS / kind).glob("*.yaml"))}
    name = Path(given).name.casefold().replace("-", "_")
    is_name = Path(given).name == str(given)
    if is_name and name in presets:
        return presets[name]
    if path.is_dir():
        without = " without config.json" if kind == "models" else ""
        raise UserError(f"{path}: cannot be read: is a folder{without}")
    if name in presets:
        raise UserError(
            f"{path}: cannot be read: No such file or directory, and names on a hub are not "
            f"looked up; give {name}, the preset, or a file"
        )
    known = advice(Path(name).stem, presets)
    raise UserError(f"{path}: cannot be read: No such file or directory, nor a preset; {known}")


def read_text(path: str | Path, form: str) -> str:
    """The text of a file that a user names.

    Args:
        path: the file.
        form: what it has to hold, for messages, such as "YAML".

    Raises:
        UserError: it cannot be read, or is no text.
    """
    try:
        # Some editors write a byte order mark.
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is no text file (UTF-8), must be {form}") from error


def read_json(path: str | Path) -> Any:
    """Read the plain data in a file of one JSON document.

    Raises:
        UserError: the file cannot be read or is no such document; one line.
    """
    try:
        return json.loads(read_text(path, "JSON"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: is no JSON in line {error.lineno}: {error.msg}") from error


def check_can_be_written(path: Path, name: str) -> None:
    """Refuse a path, given as `name`, that is a folder or in a folder that cannot be written.

    Raises:
        UserError: one line.
    """
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"{name}: got {path}, must be a file in a folder that can be written")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, so that it exists whole or not at all.

    Raises:
        OSError: it cannot be written.
        UserError: something that is no file bears its name.
    """
    # Root would replace /dev/null.
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: cannot be written: is no regular file")
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        # It still exists only if something went wrong.
        temporary.unlink(missing_ok=True)


def versions() -> dict[str, str | None]:
    """The versions of Python, the packages involved, NCCL and the GPU's driver; None if absent.

    NCCL is that of torch where torch is imported, else that of its package.
    """
    packages = ("monta-megatron", "megatron-core", "torch", "triton", "transformer-engine", "numpy")
    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in packages},
        "nccl": _nccl_version(),
        "driver": _driver_version(),
    }


def versions_text(found: Mapping[str, str | None]) -> str:
    """Versions in one line, without what is absent."""
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def _nccl_version() -> str | None:
    torch = sys.modules.get("torch")
    if torch is None:
        found = (version_of(f"nvidia-nccl-cu{cuda}") for cuda in (13, 12))
        return next(filter(None, found), None)
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


# "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ..."
DRIVER = Path("/proc/driver/nvidia/version")


def _driver_version() -> str | None:
    if not DRIVER.exists():
        return None
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", DRIVER.read_text())
    return match and match[1]


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


def commit(folder: Path = _IN_CHECKOUT) -> str | None:
    """The commit of a folder, "-dirty" where it was changed; None outside of a checkout.

    By default that of this package, of which a wheel has none, wherever it is installed.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
