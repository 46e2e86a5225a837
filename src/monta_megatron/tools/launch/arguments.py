"""Megatron's arguments of a run: the model's, the run file's, then the command line's."""

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from monta_megatron.common.rules import whole
from monta_megatron.integration.options import DISPATCHER_TYPE
from monta_megatron.planner.models.files import load_arguments
from monta_megatron.tools.launch.run_config import RunConfig

# Field of the layout -> Megatron's argument. All are passed on, because Megatron's defaults differ:
# without an ETP it takes ETP = TP.
PARALLEL_ARGUMENTS = {
    "tp": "tensor-model-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
}
DISPATCHER = "moe-token-dispatcher-type"
MONTA_PREFIX = "moe-monta-"
CLUSTER = "moe-monta-cluster"
VARIABLE = re.compile(r"\$\{(\w+)\}")

# Name with dashes -> a text, a number, a list of them, True for a flag, or False for an argument
# that is left out; in the order in which they are passed on.
Arguments = dict[str, Any]


def key_of(name: str) -> str:
    """One spelling for `lr-decay-style` and `lr_decay_style`."""
    return name.replace("_", "-")


def from_mapping(mapping: Mapping[str, Any]) -> Arguments:
    """The arguments of a section of a file."""
    return {key_of(name): value for name, value in mapping.items()}


def from_words(words: Sequence[str]) -> Arguments:
    """The arguments of a command line; `--name false` leaves out one of the file.

    Raises:
        ValueError: the first word is not an argument's name.
    """
    values: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word.removeprefix("--").partition("=")
            values[key_of(name)] = [value] if has_value else []
        elif name is None:
            raise ValueError(f"got {word!r} after --, must be arguments of Megatron: --lr 1e-4")
        else:
            values[key_of(name)].append(word)
    return {name: _value_of(words) for name, words in values.items()}


def _value_of(words: list[str]) -> Any:
    if words == ["false"]:
        return False
    return True if not words else words[0] if len(words) == 1 else words


def words_of(arguments: Arguments) -> list[list[str]]:
    """Words of each argument on a command line."""
    return [
        [f"--{name}"]
        if value is True
        else [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        for name, value in arguments.items()
        if value is not False
    ]


def is_given(arguments: Arguments, name: str) -> bool:
    """Whether an argument is passed on."""
    return arguments.get(name, False) is not False


def size_of(arguments: Arguments, name: str, default: int) -> int:
    """The integer >= 1 that an argument gives, or else the default.

    Raises:
        ValueError: it is no such integer.
    """
    if not is_given(arguments, name):
        return default
    try:
        return whole(1)(str(arguments[name]))
    except ArgumentTypeError as error:
        raise ValueError(f"--{name}: {error}") from None


def merge(
    config: RunConfig, command_line: Arguments
) -> tuple[RunConfig, Arguments, tuple[str, ...]]:
    """Merge the model, defaults, the run file and the command line, the last of which wins.

    Args:
        config: the file's configuration, its variables replaced and its paths resolved.
        command_line: the arguments after `--`; a parallel size changes the layout.

    Returns:
        The configuration with everything in it, so that it needs no model file; Megatron's
        arguments; notes on the model, and what was left out and why.

    Raises:
        ValueError: the layout contradicts its number of ranks.
    """
    # Step 1: the script's arguments may be given after `--` too.
    given = dict(command_line)
    script_arguments = {
        name: given.pop(key_of(name), value) for name, value in config.script_arguments.items()
    }

    # Step 2: all of Megatron's.
    of_model, notes = ({}, ()) if config.model is None else load_arguments(config.model)
    defaults = {DISPATCHER: DISPATCHER_TYPE, CLUSTER: config.cluster or False}
    arguments = from_mapping(of_model) | defaults | from_mapping(config.megatron) | given
    is_stock = arguments[DISPATCHER] != DISPATCHER_TYPE
    # Stock's dispatchers refuse our options; so one file serves to compare with them.
    ours = [name for name in arguments if name.startswith(MONTA_PREFIX)]
    unused = [name for name in ours if is_given(arguments, name)] if is_stock else []
    if unused:
        notes = (*notes, f"{', '.join(unused)}: left out, {DISPATCHER} is not {DISPATCHER_TYPE}")
        arguments = {name: value for name, value in arguments.items() if name not in ours}

    # Step 3: the layout, and the arguments that are its.
    sizes = {
        field: size_of(arguments, name, getattr(config.layout, field))
        for field, name in PARALLEL_ARGUMENTS.items()
    }
    passed_on = {PARALLEL_ARGUMENTS[field]: size for field, size in sizes.items()} | {
        name: value
        for name, value in arguments.items()
        if name not in PARALLEL_ARGUMENTS.values() and value is not False
    }
    resolved = replace(
        config,
        layout=replace(config.layout, **sizes),
        model=None,
        cluster=passed_on.get(CLUSTER, config.cluster),
        megatron={
            name: value
            for name, value in passed_on.items()
            if name not in (*PARALLEL_ARGUMENTS.values(), CLUSTER)
        },
        script_arguments=script_arguments,
    )
    try:
        _ = resolved.layout.parallel
    except ValueError as error:
        raise ValueError(f"layout: {error}") from error
    return resolved, passed_on, tuple(notes)


def replaced(value: Any, variables: Mapping[str, str], key: str = "") -> Any:
    """A value with `${NAME}` replaced in its texts.

    Args:
        value: a dataclass, a mapping, a list or a scalar.
        variables: NAME -> text.
        key: path of the value, for messages.

    Raises:
        ValueError: a variable is not set.
    """
    if is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in fields(value)]
        return replace(value, **_each({n: getattr(value, n) for n in names}, variables, key))
    if isinstance(value, Mapping):
        return _each(value, variables, key)
    if isinstance(value, list | tuple):
        return type(value)(replaced(entry, variables, key) for entry in value)
    if not isinstance(value, str):
        return value
    for name in VARIABLE.findall(value):
        if name not in variables:
            raise ValueError(f"{key}: got {value}, {name} must be set")
    return VARIABLE.sub(lambda match: variables[match[1]], value)


def _each(values: Mapping[str, Any], variables: Mapping[str, str], key: str) -> dict[str, Any]:
    path = f"{key}." if key else ""
    return {name: replaced(each, variables, path + name) for name, each in values.items()}
