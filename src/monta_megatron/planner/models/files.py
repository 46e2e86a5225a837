"""Load a model by its name, its file, a run file, or the config.json of Hugging Face.

A model file holds Megatron's arguments by their names without --, and `source`; `not_expressed`
names what of the model they do not say.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monta_megatron.common import files, presets, strict_yaml
from monta_megatron.planner.models.model import Model, model_of

OTHER_KEYS = ("source", "not_expressed")


def load_model(path: str | Path) -> Model:
    """Read a model file, a run file, a config.json of Hugging Face or its folder, or a preset.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    path = presets.find("models", path)
    if path.suffix.lower() == ".json":
        from monta_megatron.planner.models.config_json import model_of_config

        return model_of_config(files.read(path), str(path))
    data = _read(path)
    name, where, notes = path.stem, str(path), tuple(data.pop("not_expressed", ()))
    if isinstance(data.get("megatron"), Mapping):
        # A run file: its arguments win over its model's.
        name, where, data = str(data.get("name", name)), f"{path}: megatron", _of_run(data, path)
    notes = tuple(f"not expressed by Megatron's arguments: {note}" for note in notes)
    return model_of(data, name, where, notes)


def load_arguments(path: str | Path) -> dict[str, Any]:
    """Megatron's arguments of a model file, a config.json or a preset.

    Raises:
        ValueError: likewise.
    """
    path = presets.find("models", path)
    if path.suffix.lower() == ".json":
        return dict(load_model(path).arguments)
    data = _read(path)
    return {name: value for name, value in data.items() if name not in OTHER_KEYS}


def _read(path: Path) -> dict[str, Any]:
    data = strict_yaml.read(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must be a mapping of Megatron's arguments, or a config.json")
    return data


def _of_run(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    model = data.get("model")
    of_model = (
        {} if model is None else load_arguments(presets.find("models", str(model), path.parent))
    )
    return {**of_model, **data["megatron"]}
