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
    if _is_run(data):
        arguments, notes = _of_run(data, path)
        return model_of(arguments, str(data.get("name", path.stem)), f"{path}: megatron", notes)
    arguments, notes = _of_model(data)
    return model_of(arguments, path.stem, str(path), notes)


def load_arguments(path: str | Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Megatron's arguments of a model file, a config.json or a preset, and notes on the model.

    Raises:
        ValueError: likewise.
    """
    path = presets.find("models", path)
    if path.suffix.lower() == ".json":
        model = load_model(path)
        return dict(model.arguments), model.notes
    return _of_model(_read(path))


def is_run_file(path: str | Path) -> bool:
    """Whether a file or preset of a model is a run file."""
    path = presets.find("models", path)
    return path.suffix.lower() != ".json" and _is_run(_read(path))


def _is_run(data: Mapping[str, Any]) -> bool:
    return isinstance(data.get("megatron"), Mapping)


def _read(path: Path) -> dict[str, Any]:
    data = strict_yaml.read(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must be a mapping of Megatron's arguments, or a config.json")
    for name in data:
        if not isinstance(name, str):
            raise ValueError(f"{path}: {name}: must be the name of an argument of Megatron")
    return data


def _of_model(data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    notes = data.get("not_expressed") or ()
    return (
        {name: value for name, value in data.items() if name not in OTHER_KEYS},
        tuple(f"not expressed by Megatron's arguments: {note}" for note in notes),
    )


def _of_run(data: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    if data.get("model") is None:
        return dict(data["megatron"]), ()
    of_model, notes = load_arguments(presets.find("models", str(data["model"]), path.parent))
    # The run's own arguments win over its model's.
    return {**of_model, **data["megatron"]}, notes
