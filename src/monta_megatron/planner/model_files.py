"""Load a model by its name, its file, or the config.json of Hugging Face."""

from pathlib import Path

from monta_megatron.common import files, presets, strict_yaml
from monta_megatron.planner.huggingface import model_of_config
from monta_megatron.planner.model import Model


def load_model(path: str | Path) -> Model:
    """Read a model file, a config.json of Hugging Face or its folder, or a preset by its name.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    file = presets.find("models", path)
    if file.suffix.lower() != ".json":
        return strict_yaml.load(Model, file)
    return model_of_config(files.read(file), str(file))
