"""What the config.json of published models says, without what no planner needs.

By the names of the presets, or of the family where there is none. The numbers of parameters are
those of the checkpoints.
"""

import json
from pathlib import Path
from typing import Any

from monta_megatron.planner.config_json import read_config
from monta_megatron.planner.model import Model, model_of

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)

# Without layers of multi-token prediction: that of GLM-4.5-Air is INTELLECT-3, which has none, and
# that of Granite the guardian of the same sizes.
NUM_PARAMETERS = {
    "dbrx": 131_596_523_520,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_419_200,
    "glm4_moe": 106_852_251_264,
    "gpt_oss_120b": 116_829_156_672,
    "granitemoe": 3_298_793_472,
    "minimax_m2": 228_689_764_864,
    "mixtral_8x22b": 140_620_634_112,
    "mixtral_8x7b": 46_702_792_704,
    "olmoe_1b_7b": 6_919_161_856,
    "qwen2_moe": 14_315_784_192,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_next": 79_674_391_296,
}

# Published numbers are rounded, or count a vision part (Llama-4-Scout 108,641,793,536): these are
# the parameters of the family's class in transformers (5.24) with this config.json.
OF_THE_CLASS = {
    "dots1": 142_774_373_888,
    "ernie4_5_moe": 21_825_437_888,
    "hunyuan_v1_moe": 80_393_183_232,
    # Rounded, as for its checkpoint.
    "kimi_k2": 1_026_000_000_000,
    "llama4": 107_769_861_120,
    "phimoe": 41_873_153_344,
    "qwen3_5_moe": 34_660_610_688,
}
# Linear attention needs Transformer Engine even on the meta device.
NEEDS_TRANSFORMER_ENGINE = {"qwen3_5_moe", "qwen3_next"}
# Families and models without a preset.
NO_PRESET = {"qwen2_moe", "glm4_moe", "granitemoe", "minimax_m2", "qwen3_next", *OF_THE_CLASS}
NO_PRESET -= {"kimi_k2"}


def model_of_config(data: dict[str, Any], file: str) -> Model:
    """The model of the plain data of a config.json."""
    name, arguments, notes = read_config(data, file)
    return model_of(arguments, name, file, notes)
