"""Presets: the models, clusters and runs of `configs/`, which every installation has by name."""

from pathlib import Path
from typing import Literal

from monta_megatron.common.names import advice, same_name

Kind = Literal["models", "clusters", "runs"]

CONFIG = "config.json"

# setup.py puts the checkout's folder into the package of a wheel.
_IN_WHEEL, _IN_CHECKOUT = (
    Path(__file__).parents[1] / "configs",
    Path(__file__).parents[3] / "configs",
)
FOLDER = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CHECKOUT


def find(kind: Kind, given: str | Path, folder: str | Path = "") -> Path:
    """The file that a user means: an existing path, or else the name of a preset.

    For a model it may be a folder as well, of Hugging Face, whose `config.json` is meant.

    Args:
        kind: what it holds.
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
