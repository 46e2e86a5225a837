"""A model from the config.json of Hugging Face.

How the model is trained is in no config.json: `SEQ_LENGTH` and `ASSUMED` say what is taken.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from monta_megatron.common import strict_yaml
from monta_megatron.common.names import one_of
from monta_megatron.common.texts import shown
from monta_megatron.planner.model import Model
from monta_megatron.planner.model_families import FAMILIES

# The sequence length, if the model has so many positions; and the rest.
SEQ_LENGTH = 4096
ASSUMED = {"micro_batch_size": 1, "dtype": "bf16", "probs_dtype": "fp32"}


def model_of_config(data: Any, file: str) -> Model:
    """The model of a config.json.

    Args:
        data: its plain data.
        file: for messages, and as the model's source.

    Raises:
        ValueError: one line that names the file, the field, its value and the rule; all fields
            that are missing together.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{file}: must be a mapping, as a config.json of Hugging Face is")
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        given = "missing" if model_type is None else f"got {shown(repr(model_type)[:60])}"
        raise ValueError(
            f"{file}: model_type: {given}, must be {one_of(model_type, FAMILIES)}; for another "
            "model write a file of its own, `monta new model` begins one"
        )
    family = FAMILIES[model_type]
    sizes = strict_yaml.build(family, _known(family, data), file).dimensions()
    billions = sizes.num_parameters / 1e9
    seq_length = min(SEQ_LENGTH, sizes.max_positions or SEQ_LENGTH)
    assumed = {"seq_length": seq_length, **ASSUMED}
    values = {
        "name": f"{model_type} {billions:.3g}B",
        "source": f"{shown(file)}; parameters: counted from its sizes, norms and biases left out",
        "hidden_size": sizes.hidden_size,
        "num_layers": sizes.num_layers,
        "num_moe_layers": sizes.num_moe_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_query_groups": sizes.num_query_groups,
        "num_experts": sizes.num_experts,
        "moe_router_topk": sizes.topk,
        "moe_ffn_hidden_size": sizes.expert_ffn_size,
        "num_parameters_billions": float(f"{billions:.4g}"),
        "moe_router_num_groups": sizes.num_groups,
        "moe_router_group_topk": sizes.group_topk,
        **assumed,
        "assumed": list(assumed),
    }
    return strict_yaml.build(Model, values, file)


def _known(kind: Any, data: Any) -> Any:
    """The part of a config.json that a class reads; the rest is no concern of ours."""
    if not is_dataclass(kind) or not isinstance(data, Mapping):
        return data
    hints = get_type_hints(kind)
    names = [entry.name for entry in fields(kind) if entry.name in data]
    return {name: _known(hints[name], data[name]) for name in names}
