"""A model, as Megatron's arguments say it: the sizes that the planner reads, and its parameters.

One reader for every source of arguments: a model file, a run file, the arguments that a training
printed, a config.json of Hugging Face (`config_json` gives its arguments). Values may be texts, as
in a log: "4096", "True", "None", "([0]*3+[1]*58)".

A model file holds Megatron's arguments by their names without --, and `source`; `not_expressed`
names what of the model they do not say.

Notation: H = hidden size, L = layers.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from monta_megatron.common import files, strict_yaml
from monta_megatron.common.errors import UserError
from monta_megatron.planner.config_json import MAX_LAYERS, ModelArguments, read_config

# Keys of a model file that are no arguments.
OTHER_KEYS = ("source", "not_expressed")
BATCH = ("seq-length", "micro-batch-size")
GATED = ("swiglu", "quick-geglu")
# Symbols of a hybrid pattern: mamba, attention, feed-forward layer, experts, gated delta net.
HYBRID_PATTERNS = ("hybrid-layer-pattern", "hybrid-override-pattern")
HYBRID_SYMBOLS, EXPERTS_SYMBOL = set("M*-EGD+"), "E"
# Gated delta net, and sparse attention.
UNCOUNTED_SYMBOLS = set("GD")


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a model, and the batch that it is trained with.

    Attributes:
        name: name of the model, as users call it.
        row_size: number of values of a row that is sent to experts: the latent size, or H.
        num_layers: number of layers, L.
        moe_layers: [L] whether each layer has experts.
        num_attention_heads: number of query heads; a tensor parallel size must divide it.
        num_experts: number of routed experts per layer.
        moe_router_topk: number of experts per token.
        moe_ffn_hidden_size: FFN size of one expert; an expert tensor parallel size must divide it.
        seq_length: tokens per sequence.
        micro_batch_size: sequences per micro-batch.
        value_bytes: bytes of one hidden value.
        prob_bytes: bytes of one routing probability.
        state_bytes: bytes of a parameter's weight, gradient, and optimizer state.
        moe_router_num_groups: number of expert groups of a group-limited router; None without one.
        moe_router_group_topk: number of groups that a token may use; None without groups.
        vocab_size: number of entries of the vocabulary; 0 where it is not known.
        expert_parameters: number of parameters of the routed experts of one layer.
        layer_parameters: [L] number of parameters of each layer without its routed experts; None
            where they cannot be counted, for the reasons in `uncounted`.
        table_parameters: number of parameters of the vocabulary's embedding; the output layer has
            as many.
        is_tied: whether embedding and output layer share one table.
        notes: remarks that a plan prints about the model.
        uncounted: reasons why the parameters cannot be counted.
        arguments: Megatron's arguments by their names without --.
    """

    name: str
    row_size: int
    num_layers: int
    moe_layers: tuple[bool, ...]
    num_attention_heads: int
    num_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    seq_length: int
    micro_batch_size: int
    value_bytes: int
    prob_bytes: int
    state_bytes: tuple[int, int, int]
    moe_router_num_groups: int | None
    moe_router_group_topk: int | None
    vocab_size: int
    expert_parameters: int
    layer_parameters: tuple[int, ...] | None
    table_parameters: int
    is_tied: bool
    notes: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)


class Reader:
    """Reads typed values of arguments, and remembers which.

    Args:
        arguments: values by Megatron's names with dashes, without --.
        where: the file or the command, for messages.
    """

    def __init__(self, arguments: Mapping[str, Any], where: str) -> None:
        self._arguments, self._where = arguments, where
        self._read: set[str] = set()

    def value(self, name: str) -> Any:
        """The value as it is; None where it is not given, or given as none."""
        self._read.add(name)
        value = self._arguments.get(name)
        return None if value is False or value in ("None", "", "False") else value

    def flag(self, *names: str) -> bool:
        """Whether one of these flags is set."""
        return any(self.value(name) in (True, "True", "true") for name in names)

    def size(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer >= `minimum`; without a default it must be given."""
        value = self.value(name)
        if value is None and default is not None:
            return default
        if value is None:
            self.require_spelling()
            # Wider than above, but no longer hidden-size for ffn-hidden-size.
            unread = self._arguments.keys() - self._read
            misspelt = next(iter(get_close_matches(name, unread, 1, 0.88)), None)
            advice = "" if misspelt is None else f"; is it misspelt as {misspelt}?"
            raise UserError(f"{self._where}: {name}: missing, must be given{advice}")
        number = value if type(value) is int else None
        if isinstance(value, str) and value.strip().isdecimal():
            number = int(value)
        self.require(number is not None and number >= minimum, name, f"an integer >= {minimum}")
        assert number is not None
        return number

    def optional(self, name: str) -> int | None:
        """An integer >= 1, or None where it is not given."""
        return None if self.value(name) is None else self.size(name)

    def bytes_of(self, name: str, default: int) -> int:
        """Bytes of a dtype whose name ends in its bits, such as bf16 or torch.uint8."""
        bits = re.search(r"\d+$", str(self.value(name)))
        return int(bits[0]) // 8 if bits else default

    def require_spelling(self) -> None:
        """Refuse an argument whose name is nearly that of one that is read.

        Raises:
            UserError: there is one; names it, and the one that may be meant.
        """
        for name in self._arguments.keys() - self._read:
            # Closer than any two names of Megatron's that mean different things.
            for meant in get_close_matches(name, self._read, 1, 0.93):
                raise UserError(f"{self._where}: {name}: unknown; did you mean {meant}?")

    def require(self, holds: bool, name: str, rule: str) -> None:
        """Refuse an argument that breaks a rule.

        Raises:
            UserError: it does; names where it was given, the argument, its value and the rule.
        """
        if not holds:
            value = f"{self._arguments.get(name)!r:.60}"
            raise UserError(f"{self._where}: {name}: got {value}, must be {rule}")


def load_model(path: str | Path) -> Model:
    """Read a model file, a config.json of Hugging Face or its folder, or a preset.

    Raises:
        UserError: one line that names the file, the key, the value and the rule.
    """
    path = files.find_config("models", path)
    file = _read(path)
    return model_of(file.arguments, file.name, str(path), file.notes, file.uncounted)


def load_arguments(path: str | Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Megatron's arguments of a model file, a config.json or a preset, and notes on the model.

    Raises:
        UserError: likewise; sizes are not checked.
    """
    file = _read(files.find_config("models", path))
    return file.arguments, file.notes


def _read(path: Path) -> ModelArguments:
    """What a model file or a config.json tells."""
    if path.suffix.lower() == ".json":
        # A plan's title names the file: a family has many models.
        return replace(read_config(files.read_json(path), str(path)), name=str(path))
    data = strict_yaml.read(path)
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise UserError(f"{path}: must be Megatron's arguments by their names, or a config.json")
    unexpressed = data.get("not_expressed") or ()
    notes = (f"not expressed by Megatron's arguments: {text}" for text in unexpressed)
    arguments = {name: data[name] for name in data if name not in OTHER_KEYS}
    return ModelArguments(name=path.stem, arguments=arguments, notes=tuple(notes))


def model_of(
    arguments: Mapping[str, Any],
    name: str,
    where: str,
    notes: tuple[str, ...] = (),
    uncounted: tuple[str, ...] = (),
) -> Model:
    """The model that Megatron's arguments say.

    Args:
        arguments: values by Megatron's names without --, with dashes or underscores.
        name: name of the model, as users call it.
        where: the file or the command, for messages.
        notes: other remarks that a plan prints about the model.
        uncounted: properties that may change its layers or parameters and are not among the
            arguments.

    Raises:
        UserError: one line that names `where`, an argument, its value and the rule.
    """
    arguments = {name.replace("_", "-"): value for name, value in arguments.items()}
    read = Reader(arguments, where)
    hidden_size, heads = read.size("hidden-size"), read.size("num-attention-heads")
    experts, topk = read.size("num-experts"), read.size("moe-router-topk", 2)
    layers = _moe_layers(read)
    seq_length, micro_batch_size = (read.size(size) for size in BATCH)
    # Megatron's default of a gated layer is 8/3 of H in multiples of 64.
    default = 4 * hidden_size * 2 // 3 // 64 * 64 if read.flag("swiglu") else 4 * hidden_size
    ffn = read.size("ffn-hidden-size", max(default, 1))
    moe_ffn = read.size("moe-ffn-hidden-size", ffn)
    groups = read.optional("moe-router-num-groups")
    group_topk = read.optional("moe-router-group-topk")
    read.require(topk <= experts, "moe-router-topk", f"at most num-experts ({experts})")
    rule = f"such that a layer has experts, of num-layers ({len(layers)})"
    read.require(any(layers), "moe-layer-freq", rule)
    if groups is not None or group_topk is not None:
        rule = f"a divisor of the {experts} experts, with as many or fewer in "
        rule += f"moe-router-group-topk that hold the {topk} experts of a token"
        total, chosen = groups or 0, group_topk or 0
        holds = 1 <= chosen <= total and experts % total == 0 and experts // total * chosen >= topk
        read.require(holds, "moe-router-num-groups", rule)
    state_bytes = _state_bytes(read)
    row_size = read.size("moe-latent-size", hidden_size)
    is_tied = not read.flag("untie-embeddings-and-output-weights")
    gate = 3 if read.flag(*GATED) else 2
    vocab_size = read.size("vocab-size", 0, minimum=0)
    uncounted = (*uncounted, *_uncounted_arguments(read))
    layer_parameters = None
    if not uncounted:
        layer_parameters = _layer_parameters(read, hidden_size, layers, gate, ffn)
    if read.size("mtp-num-layers", 0, minimum=0):
        notes += ("multi-token prediction is not counted: a layer more on the last stage",)
    read.require_spelling()
    return Model(
        name=name,
        row_size=row_size,
        num_layers=len(layers),
        moe_layers=tuple(layers),
        num_attention_heads=heads,
        num_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=moe_ffn,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        value_bytes=state_bytes[0],
        prob_bytes=read.bytes_of("moe-router-dtype", state_bytes[0]),
        state_bytes=state_bytes,
        moe_router_num_groups=groups,
        moe_router_group_topk=group_topk,
        vocab_size=vocab_size,
        expert_parameters=experts * gate * row_size * moe_ffn,
        layer_parameters=layer_parameters,
        table_parameters=vocab_size * hidden_size,
        is_tied=is_tied,
        notes=notes,
        uncounted=uncounted,
        arguments=arguments,
    )


def _state_bytes(read: Reader) -> tuple[int, int, int]:
    """Bytes of a parameter, its gradient, and its master weight and two moments in Adam."""
    read.require(not (read.flag("bf16") and read.flag("fp16")), "fp16", "left out with bf16")
    names = ("main-grads", "main-params", "exp-avg", "exp-avg-sq")
    gradient, master, *moments = (read.bytes_of(f"{name}-dtype", 4) for name in names)
    if read.flag("bf16"):
        gradient = 2 if read.flag("grad-reduce-in-bf16") else gradient
        # The precision-aware optimizer stores the 16 bits that a weight in bf16 lacks.
        master = 2 if read.flag("use-precision-aware-optimizer") else master
    elif read.flag("fp16"):
        gradient = 4 if read.flag("accumulate-allreduce-grads-in-fp32") else 2
    else:
        return 4, gradient, sum(moments)
    return 2, gradient, master + sum(moments)


def _uncounted_arguments(read: Reader) -> Iterator[str]:
    """Arguments that keep the parameters from being counted."""
    if read.value("vocab-size") is None:
        yield "vocab-size: not given"
    for symbol in sorted(set(_hybrid_pattern(read) or "") & UNCOUNTED_SYMBOLS):
        yield f"hybrid-layer-pattern: layers {symbol}"


def _layer_parameters(
    read: Reader, hidden_size: int, layers: list[bool], gate: int, ffn: int
) -> tuple[int, ...]:
    """[L] weights of the matrices of each layer without its routed experts, within 1%.

    Norms, biases, learned positions and multi-token prediction are left out; linear attention
    counts as full.

    Args:
        read: reader of the model's arguments.
        hidden_size: hidden size, H.
        layers: [L] whether each layer has experts.
        gate: number of matrices of an FFN: 3 with a gate, else 2.
        ffn: FFN size of a dense layer.
    """
    latent, experts = read.optional("moe-latent-size") or 0, read.size("num-experts")
    shared = read.size("moe-shared-expert-intermediate-size", 0, minimum=0)
    attention = _attention_parameters(read, hidden_size)
    # Of an MoE layer besides its experts: router, shared experts, projections to the latent rows.
    beside = hidden_size * (experts + gate * shared + 2 * latent)
    dense = gate * hidden_size * ffn
    pattern = _hybrid_pattern(read)
    if pattern is not None:
        # One symbol is either an attention, a Mamba layer or an FFN.
        mamba = _mamba_parameters(read, hidden_size)
        by_symbol = {"M": mamba, "*": attention, "+": attention, "-": dense, "E": beside}
        return tuple(by_symbol[symbol] for symbol in pattern)
    return tuple(attention + (beside if has_experts else dense) for has_experts in layers)


def _mamba_parameters(read: Reader, hidden_size: int) -> int:
    """Weights of a Mamba-2 layer, whose inner size is 2 H unless its heads are given."""
    state, head = read.size("mamba-state-dim", 128), read.size("mamba-head-dim", 64)
    groups = read.size("mamba-num-groups", 8)
    heads = read.size("mamba-num-heads", max(2 * hidden_size // head, 1))
    inner, state_values = heads * head, 2 * groups * state
    # From H to the gate, x, B, C and the step of each head; a convolution over 4 tokens; back to H.
    into = hidden_size * (2 * inner + state_values + heads)
    return into + 4 * (inner + state_values) + inner * hidden_size


def _attention_parameters(read: Reader, hidden_size: int) -> int:
    """Weights of the attention of a layer."""
    heads = read.size("num-attention-heads")
    if read.flag("multi-latent-attention"):
        head, rotated = read.size("qk-head-dim", 128), read.size("qk-pos-emb-head-dim", 64)
        value, rank = read.size("v-head-dim", 128), read.size("kv-lora-rank", 32)
        queries, query_rank = heads * (head + rotated), read.optional("q-lora-rank")
        query = (
            hidden_size * queries if query_rank is None else query_rank * (hidden_size + queries)
        )
        keys_and_values = hidden_size * (rank + rotated) + rank * heads * (head + value)
        return query + keys_and_values + heads * value * hidden_size
    head = read.size("kv-channels", max(hidden_size // heads, 1))
    groups = read.size("num-query-groups", heads) if read.flag("group-query-attention") else heads
    gate = heads if read.flag("attention-output-gate") else 0
    return hidden_size * head * (2 * heads + 2 * groups + gate)


def _moe_layers(read: Reader) -> list[bool]:
    """[L] whether each layer has experts.

    Raises:
        UserError: a pattern is none of Megatron's forms, or one of other layers.
    """
    pattern = _hybrid_pattern(read)
    if pattern is not None:
        return [symbol == EXPERTS_SYMBOL for symbol in pattern]
    num_layers = read.size("num-layers")
    read.require(num_layers <= MAX_LAYERS, "num-layers", f"at most {MAX_LAYERS:,}")
    frequency = read.value("moe-layer-freq")
    layers = _pattern_of(1 if frequency is None else frequency, num_layers)
    rule = f"an integer >= 1, or a list of 0 and 1 for each of num-layers ({num_layers})"
    read.require(layers is not None, "moe-layer-freq", rule)
    return layers or []


def _hybrid_pattern(read: Reader) -> str | None:
    """The symbols of a hybrid pattern, one for each layer; None without a pattern.

    Raises:
        UserError: it has other symbols.
    """
    for name in HYBRID_PATTERNS:
        if read.value(name) is not None:
            # Parts of pipeline stages and of multi-token prediction are separated.
            symbols = str(read.value(name)).split("/")[0].replace("|", "")
            rule = f"a pattern of {' '.join(sorted(HYBRID_SYMBOLS))}"
            read.require(bool(symbols) and set(symbols) <= HYBRID_SYMBOLS, name, rule)
            return symbols
    return None


def _pattern_of(frequency: Any, num_layers: int) -> list[bool] | None:
    """Layers with experts by a frequency of Megatron: an integer, or such as ([0]*3+[1]*58).

    Returns:
        None where it is of no such form, or of another number of layers.
    """
    try:
        pattern = _value(ast.parse(str(frequency), mode="eval").body)
        if isinstance(pattern, int):
            return [layer % pattern == 0 for layer in range(num_layers)]
        return [entry == 1 for entry in pattern] if len(pattern) == num_layers else None
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> Any:
    """An expression of integers, lists, + and *; a ValueError if it holds anything else."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=entries):
            return [_value(entry) for entry in entries]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
    raise ValueError(node)
