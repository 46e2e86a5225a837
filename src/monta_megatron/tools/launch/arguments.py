"""Megatron's arguments of a run: defaults, the model, the file, then the command line."""

import string
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from monta_megatron.common.flags import whole
from monta_megatron.common.text import check_printable
from monta_megatron.integration.options import DISPATCHER_TYPE
from monta_megatron.planner.models.files import load_arguments
from monta_megatron.tools.launch.run_config import RunConfig, RunLayout

T = TypeVar("T")
SIZE = whole(1)

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


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of a command line.

    Attributes:
        name: without the leading `--`, as it is passed on.
        value: True for a flag, else a text, a number or a list of them.
        source: where it was given, for messages.
    """

    name: str
    value: Any
    source: str

    @property
    def words(self) -> list[str]:
        """The argument as words of a command line."""
        if self.value is True:
            return [f"--{self.name}"]
        values = self.value if isinstance(self.value, list) else [self.value]
        return [f"--{self.name}", *map(str, values)]

    def read(self, number: Callable[[str], T]) -> T:
        """The value as a number.

        Args:
            number: one of the readers of `flags`.

        Raises:
            ValueError: it is not such a number.
        """
        try:
            return number("" if self.value is True else str(self.value))
        except ArgumentTypeError as error:
            raise ValueError(f"{self.source}: {error}") from None


# By name with dashes, in the order in which they are passed on.
Arguments = dict[str, Argument]


def key_of(name: str) -> str:
    """One spelling for `lr-decay-style` and `lr_decay_style`."""
    return name.replace("_", "-")


def from_mapping(mapping: Mapping[str, Any], source: str) -> Arguments:
    """The arguments of a section of the run file.

    Args:
        mapping: name -> value.
        source: file and section, for messages.

    Raises:
        ValueError: an argument is written twice, with dashes and with underscores.
    """
    arguments: Arguments = {}
    for name, value in mapping.items():
        key = key_of(name)
        if key in arguments:
            raise ValueError(f"{source}.{name}: is {arguments[key].name} too, must be written once")
        arguments[key] = Argument(name=name, value=value, source=f"{source}.{name}")
    return arguments


def from_words(words: Sequence[str]) -> Arguments:
    """The arguments of a command line; `--name false` is False, which removes one of the file.

    Raises:
        ValueError: the first word is not an argument's name, or one is not printable.
    """
    arguments: dict[str, Argument] = {}
    current: list[str] = []
    for word in words:
        check_printable(word, "an argument after `--`")
        if word.startswith("--"):
            name, has_value, value = word.removeprefix("--").partition("=")
            current = [value] if has_value else []
            arguments[key_of(name)] = Argument(name=key_of(name), value=current, source=f"--{name}")
        elif not arguments:
            raise ValueError(
                f"got {word!r}, must be arguments of Megatron with their -- after `--`"
            )
        else:
            current.append(word)
    return {
        key: replace(argument, value=_value_of(argument.value))
        for key, argument in arguments.items()
    }


def _value_of(words: list[str]) -> Any:
    if words == ["false"]:
        return False
    return True if not words else words[0] if len(words) == 1 else words


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A run's arguments, from all sources.

    Attributes:
        config: the configuration with everything merged into it.
        arguments: Megatron's arguments.
        script_arguments: the arguments that the script adds.
        notes: on the model, and what was left out and why.
    """

    config: RunConfig
    arguments: Arguments
    script_arguments: Arguments
    notes: tuple[str, ...]


def merge(config: RunConfig, file: str, command_line: Arguments) -> Merged:
    """Defaults, the model, the file, then the command line.

    Args:
        config: the file's configuration, its variables replaced and its paths resolved.
        file: the run file, for messages.
        command_line: the arguments after `--`; a parallel size changes the layout.

    Raises:
        ValueError: the file contradicts its layout, or the layout its number of ranks.
    """
    # Step 1: the arguments that the file lists as the script's.
    extra = from_mapping(config.script_arguments, f"{file}: script_arguments")
    for key in extra.keys() & command_line.keys():
        extra[key] = replace(command_line[key], name=extra[key].name)
    rest = {key: argument for key, argument in command_line.items() if key not in extra}

    # Step 2: the layout, changed by the command line.
    given = from_mapping(config.megatron, f"{file}: megatron")
    layout = _layout(config.layout, given, rest, file)
    sizes = {
        name: Argument(name=name, value=getattr(layout, field), source=f"{file}: layout.{field}")
        for field, name in PARALLEL_ARGUMENTS.items()
    }

    # Step 3: our defaults, the model, the file over both, the command line over all.
    defaults = {DISPATCHER: DISPATCHER_TYPE, "moe-monta-cluster": config.cluster or False}
    of_model: Arguments = {}
    notes: list[str] = []
    if config.model is not None:
        values, of_file = load_arguments(config.model)
        of_model = from_mapping(values, config.model)
        notes += of_file
    own = from_mapping(defaults, f"{file}: default of megatron") | given
    for key, argument in rest.items():
        if argument.value is False and key not in own | of_model:
            raise ValueError(f"{argument.source}: got false, must be an argument of {file}")
    own = {
        key: replace(argument, name=key)
        for key, argument in (own | rest).items()
        if key not in sizes
    }
    arguments = of_model | own
    resolved = replace(
        config,
        layout=layout,
        megatron={key: argument.value for key, argument in own.items()},
        script_arguments={argument.name: argument.value for argument in extra.values()},
    )

    # Step 4: drop our options for stock's dispatchers, which refuse them, so that one file serves
    # to compare with them.
    if arguments[DISPATCHER].value != DISPATCHER_TYPE:
        unused = [
            key
            for key, argument in arguments.items()
            if key.startswith(MONTA_PREFIX) and key not in rest and argument.value is not False
        ]
        arguments = {key: argument for key, argument in arguments.items() if key not in unused}
        if unused:
            notes.append(f"{', '.join(unused)}: left out, {DISPATCHER} is not {DISPATCHER_TYPE}")
    return Merged(
        config=resolved,
        arguments=_without_false(sizes | arguments),
        script_arguments=_without_false(extra),
        notes=tuple(notes),
    )


def _without_false(arguments: Arguments) -> Arguments:
    return {key: argument for key, argument in arguments.items() if argument.value is not False}


def _layout(layout: RunLayout, given: Arguments, command_line: Arguments, file: str) -> RunLayout:
    changes = {}
    for field, name in PARALLEL_ARGUMENTS.items():
        size = getattr(layout, field)
        if name in command_line:
            changes[field] = command_line[name].read(SIZE)
        elif name in given and given[name].read(SIZE) != size:
            raise ValueError(
                f"{given[name].source}: got {given[name].value}, must be {size} as layout.{field}, "
                "or be left out"
            )
    try:
        return replace(layout, **changes)
    except ValueError as error:
        raise ValueError(f"{file}: layout.{error}") from error


def check_batch(arguments: Arguments, dp: int) -> None:
    """Refuse a batch that cannot be shared evenly.

    Args:
        arguments: Megatron's arguments.
        dp: data parallel size.

    Raises:
        ValueError: it is no whole number of micro-batches on every data-parallel rank.
    """
    batch, micro = (arguments.get(name) for name in ("global-batch-size", "micro-batch-size"))
    # A batch that is ramped up has other sizes too; Megatron checks them all.
    if batch is None or micro is None or "rampup-batch-size" in arguments:
        return
    size, step = batch.read(SIZE), micro.read(SIZE) * dp
    if size % step:
        larger = (size // step + 1) * step
        raise ValueError(
            f"{batch.source}: got {size}, must be a multiple of {step}, which is micro-batch-size "
            f"({micro.value}) times data parallel size ({dp}); the next is {larger}"
        )


def replaced(value: Any, variables: Mapping[str, str], source: str) -> Any:
    """A value with its `${NAME}` replaced, in texts and lists of texts.

    Raises:
        ValueError: a variable is not set, or its value is not printable.
    """
    if isinstance(value, list):
        return [replaced(entry, variables, source) for entry in value]
    if not isinstance(value, str) or "$" not in value:
        return value
    try:
        text = string.Template(value).substitute(variables)
    except KeyError as error:
        raise ValueError(f"{source}: got {value!r}, {error.args[0]} must be set") from error
    except ValueError as error:
        raise ValueError(f"{source}: got {value!r}, must have $ as ${{NAME}} or $$") from error
    return check_printable(text, source)


def escaped(value: Any) -> Any:
    """The inverse of `replaced`, for values without variables: `$` becomes `$$`."""
    if isinstance(value, list):
        return [escaped(entry) for entry in value]
    return value.replace("$", "$$") if isinstance(value, str) else value
