"""What the config.json of published models says, without what no planner needs.

By the names of the presets, or of the family where there is none.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from monta_megatron.planner.config_json import read_config
from monta_megatron.planner.model import Model, model_of

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)

# By the names of the configurations.
_PARAMETERS = yaml.safe_load(
    Path(__file__).with_name("published_parameters.yaml").read_text(encoding="utf-8")
)
NUM_PARAMETERS: dict[str, int] = _PARAMETERS["checkpoints"]
OF_THE_CLASS: dict[str, int] = _PARAMETERS["classes"]
ROTARY_BASES: dict[str, int] = _PARAMETERS["rotary_bases"]
SIGMOID_SCORES: list[str] = _PARAMETERS["sigmoid_scores"]
ACTIVATIONS: dict[str, str] = _PARAMETERS["activations"]
# Linear attention needs Transformer Engine even on the meta device.
NEEDS_TRANSFORMER_ENGINE = {"qwen3_5_moe", "qwen3_next"}
# Families and models without a preset.
NO_PRESET = {"qwen2_moe", "glm4_moe", "granitemoe", "minimax_m2", "qwen3_next", *OF_THE_CLASS}
NO_PRESET -= {"kimi_k2"}
NO_PRESET |= {"nemotron_3_nano"}
# Files as transformers saves them, by their names.
SAVED = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "saved_configs").glob("*.json"))
}


def model_of_config(data: dict[str, Any], file: str) -> Model:
    """The model of the plain data of a config.json."""
    read = read_config(data, file)
    return model_of(read.arguments, read.name, file, read.notes, read.uncounted)
