"""Rotary positions of a config.json as Megatron's arguments.

transformers 4 has `rope_theta` and `rope_scaling`, transformers 5 has all of it in
`rope_parameters`, for some families in one dict per kind of layer. Megatron has one base for all
layers, and scales by YaRN, by Llama 3's rule with fixed frequencies, or linearly.
"""

import math
from collections.abc import Mapping
from typing import Any

# Constants of Megatron's scaling by Llama 3's rule, and of YaRN in latent attention, which no
# argument sets.
LLAMA3 = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
LATENT_YARN = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
# Keys that are read with every kind of scaling.
READ = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}


def rotary_arguments(
    flat: Mapping[str, Any], told: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Megatron's arguments, and names of what was not read.

    Args:
        flat: values of the config.json by key.
        told: Megatron's arguments, as far as they are known.
    """
    # Step 1: base and share of the rotated values.
    name, rope = _parameters(flat)
    if rope is None:
        return {}, ["rope_parameters (one per kind of layer)"]
    rotary: dict[str, Any] = {}
    unread = []
    base = rope.get("rope_theta", flat.get("rope_theta"))
    if _is_number(base):
        # Megatron takes no 1e6 for an integer.
        rotary["rotary-base"] = int(base) if _is_whole(base) else base
    elif base is not None:
        unread.append(f"rope_theta {base!r:.60}")
    share = rope.get("partial_rotary_factor", flat.get("partial_rotary_factor"))
    rotary_dim, head_dim = flat.get("rotary_dim"), told.get("kv-channels")
    if share is None and _is_number(rotary_dim) and _is_number(head_dim) and head_dim:
        share = rotary_dim / head_dim
    if share is not None and share != 1:
        rotary["rotary-percent"] = share

    # Step 2: scaling.
    kind = rope.get("rope_type", rope.get("type", "default"))
    others = {key: value for key, value in rope.items() if key not in READ}
    is_latent = "multi-latent-attention" in told
    if kind == "default":
        others = {key: value for key, value in others.items() if key not in LATENT_YARN}
        return rotary, [*unread, *(f"{name}.{key}" for key in others)]
    if kind == "linear" and _is_whole(rope.get("factor")):
        rotary["rotary-seq-len-interpolation-factor"] = int(others.pop("factor"))
    elif kind == "llama3" and not is_latent and _has(others, LLAMA3):
        rotary["use-rope-scaling"] = True
        rotary["rope-scaling-factor"] = others.pop("factor", 8)
        others = {key: value for key, value in others.items() if key not in LLAMA3}
    elif kind == "yarn" and is_latent:
        rotary |= _read_out(
            others,
            {"factor": "rotary-scaling-factor"}
            | {"mscale": "mscale", "mscale_all_dim": "mscale-all-dim"},
        )
        others = {key: value for key, value in others.items() if LATENT_YARN.get(key) != value}
    elif kind == "yarn":
        rotary["position-embedding-type"] = "yarn"
        rotary |= _read_out(
            others,
            {
                "factor": "rotary-scaling-factor",
                "original_max_position_embeddings": "yarn-original-max-position-embeddings",
                "beta_fast": "yarn-beta-fast",
                "beta_slow": "yarn-beta-slow",
            },
        )
        if others.pop("truncate", True) is False:
            rotary["no-yarn-correction-range-round-to-int"] = True
    else:
        return rotary, [*unread, f"{name} ({kind!s:.60})"]
    return rotary, [*unread, *(f"{name}.{key}" for key in others)]


def _parameters(flat: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """Key and content of the rotary parameters; None where kinds of layers differ in them."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = flat.get(name)
        if not isinstance(rope, Mapping):
            continue
        kinds = [value for value in rope.values() if isinstance(value, Mapping)]
        if not kinds:
            return name, rope
        return name, kinds[0] if all(kind == kinds[0] for kind in kinds) else None
    return "rope_parameters", {}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value)


def _has(values: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
    """Whether all fixed values that were given are the same."""
    return all(values.get(key, value) == value for key, value in fixed.items())


def _read_out(values: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Remove values and return them by Megatron's names."""
    return {names[key]: values.pop(key) for key in names if key in values}
