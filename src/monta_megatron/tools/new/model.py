"""A model file: from sizes, or from a config.json."""

from collections.abc import Mapping
from typing import Any

from monta_megatron.common import strict_yaml
from monta_megatron.planner.models.files import ASSUMED, SEQ_LENGTH, load_model
from monta_megatron.planner.models.model import Model
from monta_megatron.tools.new.template import Template, flags_of, make_template

# Where a size is not given, another one is taken: the key, the key of the other, and why.
TAKEN = (
    ("num_moe_layers", "num_layers", "taken: experts in every layer"),
    ("num_query_groups", "num_attention_heads", "taken: as many as query heads"),
)
ASSUMPTION = "assumed: write what the training has"


def model_template(given: Mapping[str, Any], source: str | None = None) -> Template:
    """The template of a model file.

    Args:
        given: fields of `Model` that the user gives; they win.
        source: a config.json, its folder, a model file or a preset to begin with; None for none.

    Raises:
        ValueError: the source cannot be read, or the sizes do not go together.
    """
    remarks: dict[str, str] = {}
    if source is None:
        values: dict[str, Any] = {"name": "own model", "source": "monta new model"}
        values |= {"seq_length": SEQ_LENGTH, **ASSUMED}
        assumed = ["seq_length", *ASSUMED]
    else:
        model = load_model(source)
        values = {name: value for name, value in strict_yaml.plain(model).items() if value}
        assumed = list(model.assumed)
    values |= given
    remarks |= {name: ASSUMPTION for name in assumed if name not in given}
    for name, other, why in TAKEN:
        if name not in values and other in values:
            values[name] = values[other]
            remarks[name] = why
    values.pop("assumed", None)
    return make_template(
        Model,
        values,
        about=["A model, for `monta plan --model` and for the run files of `monta launch`."],
        remarks=remarks,
        flags=flags_of(given),
        left_out=("assumed",),
    )
