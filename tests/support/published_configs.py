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
# Linear attention needs Transformer Engine even on the meta device.
NEEDS_TRANSFORMER_ENGINE = {"qwen3_5_moe", "qwen3_next"}
# Families and models without a preset.
NO_PRESET = {"qwen2_moe", "glm4_moe", "granitemoe", "minimax_m2", "qwen3_next", *OF_THE_CLASS}
NO_PRESET -= {"kimi_k2"}


def model_of_config(data: dict[str, Any], file: str) -> Model:
    """The model of the plain data of a config.json."""
    name, arguments, notes = read_config(data, file)
    return model_of(arguments, name, file, notes)
