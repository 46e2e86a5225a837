"""The config.json of Hugging Face as Megatron's arguments, by the tables of `config_keys`.

It tells sizes and layers, which a plan needs. Notes of the model name first what was not read and
what was assumed, then what a config.json does not tell, as a family leaves it to its code.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from monta_megatron.common.errors import UserError
from monta_megatron.planner import config_keys as keys
from monta_megatron.planner.config_rotary import rotary_arguments

# No config.json says how a model is trained.
ASSUMED = {
    "moe-aux-loss-coeff": 1.0e-3,
    "seq-length": 4096,
    "micro-batch-size": 1,
    "bf16": True,
    "moe-router-dtype": "fp32",
}
ALIKE = {
    "position-embedding-type": "rope",
    "disable-bias-linear": True,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "moe-router-load-balancing-type": "aux_loss",
}
# No model has more; a larger number is a mistake that a list of layers would not survive.
MAX_LAYERS = 10_000
# Megatron adds an expert's bias to these scores alone.
BIASED = ("sigmoid", "sqrtsoftplus")
# Name of an activation -> Megatron's arguments. That of gpt-oss is told by its family.
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {"swiglu": True},
    "swish": {"swiglu": True},
    "swiglu": {"swiglu": True},
    "relu2": {"squared-relu": True},
    "gpt_oss": {
        "quick-geglu": True,
        "glu-linear-offset": 1.0,
        "activation-func-clamp-value": 7.0,
        "no-bias-dropout-fusion": True,
    },
}


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Megatron's arguments of a model, as far as its file tells them.

    Attributes:
        name: name of the model, or of its family.
        arguments: values by Megatron's names without --.
        notes: remarks that a plan prints about the model, first what was not read.
        uncounted: keys that may change the model's layers or parameters and were not read.
    """

    name: str
    arguments: dict[str, Any]
    notes: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()


def read_config(data: Any, file: str) -> ModelArguments:
    """Megatron's arguments, as far as a config.json tells them.

    Args:
        data: plain data of the file.
        file: name of the file, for messages.

    Raises:
        UserError: one line that names the file, the key, the value and the rule.
    """
    family = data.get("model_type") if isinstance(data, Mapping) else None
    if not isinstance(family, str) or not family.strip():
        raise UserError(f"{file}: model_type: got {family!r:.60}, must be the name of a family")

    # Step 1: one table of keys; parts are in the order of `PARTS`.
    flat = dict(data)
    for part in keys.PARTS:
        flat |= flat[part] if isinstance(flat.get(part), Mapping) else {}
    given = {key: value for key, value in flat.items() if value is not None}
    flat = {**keys.FAMILIES.get(family, {}), **given}
    config = _Config(flat, family, file)

    # Step 2: sizes, and what follows from several keys.
    told = config.sizes()
    if "num-experts" not in told or "moe-router-topk" not in told:
        missing = "num_experts_per_tok" if "num-experts" in told else "num_local_experts"
        rule = "must be given: only models with experts are planned, this may be a dense one"
        raise UserError(f"{file}: {missing} (or another name of it): missing, {rule}")
    told |= config.layers(told)
    told |= config.attention(told)
    told |= config.router(told)
    told |= config.activation()
    if family in keys.NO_POSITIONS:
        told["position-embedding-type"] = "none"
    told |= config.shared_experts(told)
    rotary, unread = rotary_arguments(flat, told)
    told |= rotary
    config.unread.update(dict.fromkeys(unread, False))
    if "rms_norm_eps" in flat or family == "nemotron_h":
        told["normalization"] = "RMSNorm"
    told["untie-embeddings-and-output-weights"] = not flat.get("tie_word_embeddings", False)
    assumed = {name: value for name, value in ASSUMED.items() if name not in told}
    arguments = {**ALIKE, **told, **assumed}

    # Step 3: what was not read, and what cannot be told.
    config.add_unread("hybrid-layer-pattern" in told)
    uncounted = [name for name, changes_parameters in config.unread.items() if changes_parameters]
    others = [name for name in config.unread if name not in uncounted]
    notes = []
    if uncounted:
        notes.append(f"not read, may change layers or parameters: {', '.join(uncounted)}")
    if others:
        notes.append(f"not read: {', '.join(others)}")
    values = ", ".join(f"{name} {value}" for name, value in assumed.items())
    notes.append(f"not in the config.json, assumed unless given: {values}")
    notes.append(f"told by no config.json: {', '.join(config.untold(told))}")
    parts = [part for part in keys.OTHER_PARTS if isinstance(data.get(part), Mapping)]
    if parts:
        notes.append(f"the text part alone: {', '.join(parts)} is not counted")
    return ModelArguments(
        name=family,
        arguments={name: value for name, value in arguments.items() if value is not False},
        notes=tuple(notes),
        uncounted=tuple(uncounted),
    )


class _Config:
    """A config.json while it is read.

    Attributes:
        unread: key that was not read, or other property -> whether it may change layers or
            parameters.
    """

    def __init__(self, flat: Mapping[str, Any], family: str, file: str) -> None:
        self._flat, self._family, self._file = flat, family, file
        self.unread: dict[str, bool] = {}

    def _first(self, names: str) -> Any:
        """The first value that is there; one number for a list that repeats it for every layer.

        Raises:
            UserError: layers differ.
        """
        for name in names.split():
            value = self._flat.get(name)
            if isinstance(value, list):
                if not value or any(entry != value[0] for entry in value):
                    self._refuse(
                        name,
                        f"a list of {len(value)} values",
                        "a number, or the same for each layer: Megatron's layers are alike",
                    )
                value = value[0]
            if value is not None:
                return value
        return None

    def _integer(self, names: str, default: int) -> int:
        """The largest integer of several keys, at least the default.

        Raises:
            UserError: one of them is something else.
        """
        numbers = [default]
        for name in names.split():
            value = self._first(name)
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if value is None or value is False:
                continue
            if type(value) is not int:
                self._refuse(name, f"{value!r:.60}", "an integer")
            numbers.append(value)
        return max(numbers)

    def _list_of(self, kind: type, name: str) -> list[Any] | None:
        """A list of integers or of names; None where there is none.

        Raises:
            UserError: it is something else.
        """
        value = self._flat.get(name)
        if value is None or value is False:
            return None
        if not isinstance(value, list) or not all(type(entry) is kind for entry in value):
            rule = f"a list of {'integers' if kind is int else 'names'}"
            self._refuse(name, f"{value!r:.60}", rule)
        return value

    def _refuse(self, name: str, got: str, rule: str) -> None:
        raise UserError(f"{self._file}: {name}: got {got}, must be {rule}")

    def _by_table(self, aliases: Mapping[str, str]) -> dict[str, Any]:
        told = {}
        for argument, names in aliases.items():
            value = self._first(names)
            if isinstance(value, float) and value.is_integer():
                # Megatron takes no 1e6 for an integer.
                value = int(value)
            if value is not None:
                told[argument] = value
        return told

    def sizes(self) -> dict[str, Any]:
        """What the table of aliases tells."""
        told = self._by_table(keys.ALIASES)
        groups, topk = told.get("num-query-groups"), told.get("moe-router-topk")
        if self._family == "jetmoe" and type(groups) is int and type(topk) is int:
            # Each of the experts in its attention has as many heads as there are K/V heads.
            told.setdefault("num-attention-heads", groups * topk)
        if self._flat.get("multi_query") is True:
            told.setdefault("num-query-groups", 1)
        if self._flat.get("use_mtp") is False:
            told.pop("mtp-num-layers", None)
        return told

    def layers(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Layers with experts, as Megatron says them: a hybrid pattern, or ([0]*3+[1]*58)."""
        for name in ("layers_block_type", "layer_types"):
            kinds = self._list_of(str, name)
            if kinds is None:
                continue
            if {"moe", "mlp"}.isdisjoint(kinds):
                if name == "layers_block_type":
                    self.unread[name] = True
            else:
                if not set(kinds) <= keys.LAYER_SYMBOLS.keys():
                    rule = f"a list of {', '.join(keys.LAYER_SYMBOLS)}"
                    self._refuse(name, f"{sorted(set(kinds))}", rule)
                pattern = "".join(keys.LAYER_SYMBOLS[kind] for kind in kinds)
                hybrid = {"hybrid-layer-pattern": pattern, "num-layers": len(pattern)}
                return hybrid | self._by_table(keys.MAMBA_ALIASES)
        if "hybrid-layer-pattern" in told:
            return self._by_table(keys.MAMBA_ALIASES)
        num_layers = told.get("num-layers")
        if type(num_layers) is not int or not 1 <= num_layers <= MAX_LAYERS:
            # The reader of the arguments refuses it.
            return {}
        has_experts = self._layers_with_experts(num_layers)
        if all(has_experts):
            return {}
        first = has_experts.index(True) if True in has_experts else len(has_experts)
        pattern = f"([0]*{first}+[1]*{len(has_experts) - first})"
        if not all(has_experts[first:]):
            pattern = str(list(map(int, has_experts))).replace(" ", "")
        return {"moe-layer-freq": pattern}

    def _layers_with_experts(self, num_layers: int) -> list[bool]:
        """[num_layers] whether a layer has experts."""
        flat = self._flat
        kinds, frequency = self._list_of(str, "mlp_layer_types"), flat.get("moe_layer_freq")
        if kinds is not None:
            if not set(kinds) <= keys.EXPERT_LAYERS | keys.DENSE_LAYERS:
                rule = f"a list of {', '.join(sorted(keys.EXPERT_LAYERS | keys.DENSE_LAYERS))}"
                self._refuse("mlp_layer_types", f"{sorted(set(kinds))}", rule)
            if "hash_moe" in kinds:
                self.unread["mlp_layer_types (hash_moe: experts by token id)"] = False
            return [kind in keys.EXPERT_LAYERS for kind in kinds]
        if isinstance(frequency, list):
            if not all(entry in (0, 1) for entry in frequency):
                self._refuse("moe_layer_freq", f"{frequency!r:.60}", "a list of 0 and 1")
            return [entry == 1 for entry in frequency]
        for name in keys.NUMBERED.split():
            numbers = self._numbers(name)
            if numbers:
                return [layer in numbers for layer in range(num_layers)]

        first, step = self._integer(keys.FIRST_DENSE, 0), self._integer(keys.STEPS, 1)
        every, last = self._integer("moe_layer_freq", 1), self._integer("moe_layer_end_index", -1)
        period, offset = self._integer("expert_layer_period", 1), 0
        if period > 1:
            offset = self._integer("expert_layer_offset", 0)
        dense = self._list_of(int, "mlp_only_layers") or []
        return [
            layer >= first
            and (last == -1 or layer <= last)
            and (layer + 1) % step == 0
            and layer % every == 0
            and layer % period == offset % period
            and layer not in dense
            for layer in range(num_layers)
        ]

    def _numbers(self, name: str) -> list[int] | None:
        """Numbers of layers in a list, or in a text with commas."""
        value = self._flat.get(name)
        if not isinstance(value, str):
            return self._list_of(int, name)
        words = [word.strip() for word in value.split(",") if word.strip()]
        if not all(word.isdecimal() for word in words):
            self._refuse(name, f"{value!r:.60}", "numbers with commas")
        return [int(word) for word in words]

    def attention(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """The kind of attention, and the layers of linear attention."""
        if "kv-lora-rank" in told:
            latent = {"multi-latent-attention": True, "qk-layernorm": True}
            latent["num-query-groups"] = False
            return latent | ({"kv-channels": told["v-head-dim"]} if "v-head-dim" in told else {})
        if "q-lora-rank" in told:
            self.unread["q_lora_rank (without kv_lora_rank)"] = True
        attention: dict[str, Any] = {"q-lora-rank": False, "group-query-attention": True}
        if told.get("num-query-groups") in (None, told.get("num-attention-heads")):
            attention = {"q-lora-rank": False, "num-query-groups": False}
        if self._flat.get("attn_output_gate") is True:
            attention["attention-output-gate"] = True
        kinds = self._list_of(str, "layer_types")
        if "linear-key-head-dim" in told:
            # Layers of full attention between them are gated, too.
            attention["experimental-attention-variant"] = "gated_delta_net"
            attention["attention-output-gate"] = True
            if kinds and set(kinds) <= {"linear_attention", "full_attention"}:
                attention["linear-attention-freq"] = _linear_frequency(kinds)
        elif kinds and set(kinds) != {"full_attention"} and "hybrid-layer-pattern" not in told:
            self.unread["layer_types"] = not set(kinds) <= keys.SOFTMAX_ATTENTION
        return attention

    def router(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Score function, biases and groups, from `scoring_func` and `topk_method` together."""
        scores = str(self._first(keys.SCORES) or "").lower()
        method = str(self._flat.get("topk_method", "")).lower()
        if scores == "noaux_tc":
            scores, method = "", scores
        if method == "noaux_tc" and not scores:
            scores = "sigmoid"
        is_biased = method == "noaux_tc" or self._flat.get("use_routing_bias") is True
        router: dict[str, Any] = {}
        if scores in BIASED:
            router["moe-router-score-function"] = scores
            router["moe-router-enable-expert-bias"] = is_biased
        else:
            if scores not in ("", "softmax"):
                self.unread[f"{self._key_of(keys.SCORES)} {scores}"] = False
            if is_biased:
                self.unread["a bias on the router's scores, which are no sigmoid"] = False
            router["moe-router-score-function"] = "softmax" if scores == "softmax" else False
            # Megatron demands it of top-1.
            is_top_1 = told.get("moe-router-topk") == 1
            is_not_scaled = self._flat.get("norm_topk_prob") is False
            router["moe-router-pre-softmax"] = is_top_1 or is_not_scaled
        if method not in ("", "greedy", "group_limited_greedy", "noaux_tc"):
            self.unread[f"topk_method {method}"] = False
        if told.get("moe-router-topk-scaling-factor") == 1:
            router["moe-router-topk-scaling-factor"] = False
        if told.get("moe-router-num-groups") in (None, 1) or method == "greedy":
            router |= {"moe-router-num-groups": False, "moe-router-group-topk": False}
        if self._flat.get("seq_aux") is True:
            router["moe-router-load-balancing-type"] = "seq_aux_loss"
        return router

    def activation(self) -> dict[str, Any]:
        """The activation of dense layers and experts."""
        names = keys.ACTIVATION.split()
        name = next((name for name in names if name in self._flat), names[1])
        value = str(self._flat.get(name, "silu")).lower()
        if value not in ACTIVATIONS:
            # Another one may have no gate.
            self.unread[f"{name} {value}"] = True
        return ACTIVATIONS.get(value, ACTIVATIONS["silu"])

    def shared_experts(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """The size of all shared experts of a layer together."""
        # Llama 4 has one, as large as the others, and does not say so.
        number = self._integer(keys.NUM_SHARED, int("intermediate_size_mlp" in self._flat))
        size, name = told.get("moe-ffn-hidden-size"), "moe-shared-expert-intermediate-size"
        if name in told or type(size) is not int:
            return {}
        return {name: number * size or False}

    def _key_of(self, names: str) -> str:
        return next(name for name in names.split() if name in self._flat)

    def add_unread(self, has_mamba: bool) -> None:
        """Name every other key that was not read, and what Megatron cannot express."""
        if self._family in keys.UNLIKE_MEGATRON:
            self.unread[keys.UNLIKE_MEGATRON[self._family]] = True
        read = keys.READ | (keys.READ_WITH_MAMBA if has_mamba else set())
        for name, value in self._flat.items():
            if name in read or name in keys.HARMLESS or _is_off(value):
                continue
            if has_mamba and keys.FIXED_IN_MAMBA.get(name) == value:
                continue
            self.unread[name] = name not in keys.RUN_KEYS

    def untold(self, told: Mapping[str, Any]) -> Iterable[str]:
        """What neither the config.json nor its family tells."""
        yield "norms of queries and keys"
        yield "biases (none)"
        if not any(name in self._flat for name in keys.ACTIVATION.split()):
            yield "activation (SwiGLU)"
        if not told.get("moe-router-score-function"):
            yield "the router's scores (softmax)"
        if "rotary-base" not in told and self._family not in keys.NO_POSITIONS:
            yield "the rotary base (10,000)"


def _is_off(value: Any) -> bool:
    """Whether a value says that there is nothing of a kind."""
    return value is False or value in ("", [], {}) or (value == 0 and value is not True)


def _linear_frequency(kinds: list[str]) -> int | str:
    """Megatron's --linear-attention-freq: one full layer of N, or 1 for each linear one."""
    is_linear = [kind == "linear_attention" for kind in kinds]
    if not all(is_linear):
        interval = is_linear.index(False) + 1
        if is_linear == [(layer + 1) % interval != 0 for layer in range(len(kinds))]:
            return interval
    return str(list(map(int, is_linear))).replace(" ", "")
