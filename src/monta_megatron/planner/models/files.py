"""Load a model by its name, its file, or the config.json of Hugging Face.

A model file holds Megatron's arguments by their names without --, and `source`; `not_expressed`
names what of the model they do not say.
"""

from pathlib import Path
from typing import Any

from monta_megatron.common import files, strict_yaml
from monta_megatron.planner.models.model import Model, model_of

OTHER_KEYS = ("source", "not_expressed")


def load_model(path: str | Path) -> Model:
    """Read a model file, a config.json of Hugging Face or its folder, or a preset.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    path = files.find_config("models", path)
    if path.suffix.lower() == ".json":
        from monta_megatron.planner.models.config_json import model_of_config

        return model_of_config(files.read_json(path), str(path))
    arguments, notes = load_arguments(path)
    return model_of(arguments, path.stem, str(path), notes)


def load_arguments(path: str | Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Megatron's arguments of a model file, a config.json or a preset, and notes on the model.

    Raises:
        ValueError: likewise.
    """
    path = files.find_config("models", path)
    if path.suffix.lower() == ".json":
        model = load_model(path)
        return dict(model.arguments), model.notes
    data = strict_yaml.read(path)
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ValueError(f"{path}: must be Megatron's arguments by their names, or a config.json")
    notes = [f"not expressed by Megatron's arguments: {x}" for x in data.get("not_expressed") or ()]
    return {name: data[name] for name in data if name not in OTHER_KEYS}, tuple(notes)
