"""MoE layers and micro-batches of a run, from Megatron's arguments."""

import ast
import math
from typing import Any

from monta_megatron.tools.launch.arguments import SIZE, Arguments

# No model has so many layers; a list of more would only take memory.
MOST_LAYERS = 10_000


def num_micro_batches(arguments: Arguments, dp: int) -> int:
    """Micro-batches of a data parallel rank in an iteration, once the batch is ramped up.

    Args:
        arguments: Megatron's arguments.
        dp: data parallel size.
    """
    micro, batch = (arguments.get(name) for name in ("micro-batch-size", "global-batch-size"))
    samples = (1 if micro is None else micro.read(SIZE)) * dp
    return 1 if batch is None else math.ceil(batch.read(SIZE) / samples)


def num_moe_layers(arguments: Arguments, default: int) -> int:
    """Layers with experts, as the arguments say.

    Args:
        arguments: Megatron's arguments.
        default: of the model, where they name no number of layers or a pattern of no known form;
            Megatron's parser refuses a wrong one.
    """
    if "num-layers" not in arguments:
        return default
    num_layers = arguments["num-layers"].read(SIZE)
    frequency = arguments.get("moe-layer-freq")
    if frequency is None:
        return num_layers
    try:
        pattern = _value(ast.parse(str(frequency.value), mode="eval").body)
        if isinstance(pattern, list):
            return sum(pattern)
        return math.ceil(num_layers / pattern)
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError):
        return default


def _value(node: ast.expr) -> Any:
    """An expression of integers, lists, + and *, such as ([0]*3+[1]*58).

    Raises:
        ValueError: it holds anything else.
    """
    match node:
        case ast.Constant(value=int(number)) if number <= MOST_LAYERS:
            return number
        case ast.List(elts=entries):
            return [_value(entry) for entry in entries]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            factors = _value(left), _value(right)
            sizes = (len(part) if isinstance(part, list) else part for part in factors)
            if math.prod(sizes) <= MOST_LAYERS:
                return factors[0] * factors[1]
    raise ValueError(f"got {ast.unparse(node)}, must be integers, lists, + and *")
