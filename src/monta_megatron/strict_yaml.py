"""YAML into frozen dataclasses and back, strictly.

What a file may hold is written once, as the annotations of a dataclass: an unknown key, a missing
one, a wrong type or a value that breaks its rule is a one-line `ValueError` that names the file,
the path of the key, the value and the rule. Tags that would make Python objects are refused.

    @dataclass(frozen=True, kw_only=True)
    class Link:
        gbps: PositiveFloat
        note: str | None = None

    links.yaml: links[0].gbps: got -3, must be a number > 0
"""

import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from monta_megatron.names import advice, one_of
from monta_megatron.texts import PRINTABLE, shown

T = TypeVar("T")

LONGEST_VALUE = 60


@dataclass(frozen=True)
class Rule:
    """What a value has to be, beyond its type.

    Attributes:
        text: what the user reads after "must be".
        holds: whether a value satisfies it.
    """

    text: str
    holds: Callable[[Any], bool]


PositiveInt = Annotated[int, Rule("an integer >= 1", lambda value: value >= 1)]
PositiveFloat = Annotated[float, Rule("a number > 0", lambda value: value > 0)]
NonNegativeFloat = Annotated[float, Rule("a number >= 0", lambda value: value >= 0)]
Text = Annotated[str, Rule("a text that is not empty", lambda value: value.strip() != "")]


def load(cls: type[T], path: str | Path) -> T:
    """Read a YAML file into a dataclass.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    return build(cls, read(path), str(path))


def read(path: str | Path) -> Any:
    """Read the plain data in a YAML file, unchecked.

    Raises:
        ValueError: the file cannot be read, or is not plain YAML.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no text file (UTF-8), must be YAML") from error
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"{path}: is no plain YAML{where}: {_one_line(error.problem)}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{path}: is no plain YAML: {_one_line(error)}") from error


def build(cls: type[T], data: Any, file: str, key: str = "") -> T:
    """Check plain data against a dataclass and make it.

    Args:
        cls: a dataclass.
        data: plain data, as read from YAML.
        file: for messages.
        key: where in the file, for messages.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    value: T = _value(cls, data, _Place(file, key))
    return value


def dump(instance: Any) -> str:
    """A dataclass as YAML that `load` reads back to an equal one; defaults are written too."""
    return yaml.dump(plain(instance), Dumper=_Dumper, sort_keys=False, width=100)


def plain(value: Any) -> Any:
    """A dataclass as dictionaries, lists and scalars."""
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


@dataclass(frozen=True)
class _Place:
    file: str
    key: str

    def inside(self, name: str) -> "_Place":
        return _Place(self.file, f"{self.key}.{name}" if self.key else name)

    def at(self, position: int) -> "_Place":
        return _Place(self.file, f"{self.key}[{position}]")

    def error(self, message: str) -> ValueError:
        return ValueError(": ".join(part for part in (self.file, self.key, message) if part))

    def refuse(self, value: Any, rule: str) -> ValueError:
        return self.error(f"got {_shown(value)}, must be {rule}")


def _value(kind: Any, data: Any, place: _Place) -> Any:
    """`data` as `kind`: a scalar, a union with None, a literal, a tuple, a mapping, a dataclass."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(data, str) and not data.isprintable():
        raise place.refuse(data, PRINTABLE)
    if kind is Any:
        return list(_tuple((Any, ...), data, place)) if isinstance(data, list) else data
    if origin is Annotated:
        return _ruled(kind, data, place)
    if origin in (Union, types.UnionType):
        # Only `X | None`: a value that could be read in two ways would have no single rule to name.
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return None if data is None else _value(inner, data, place)
    if origin is Literal:
        if data not in arguments or isinstance(data, bool):
            raise place.refuse(data, one_of(data, map(str, arguments)))
        return data
    if origin is tuple:
        return _tuple(arguments, data, place)
    if origin is Mapping:
        return _mapping(arguments[1], data, place)
    if is_dataclass(kind):
        return _dataclass(kind, data, place)
    return _scalar(kind, data, place)


def _ruled(kind: Any, data: Any, place: _Place) -> Any:
    inner, *rules = get_args(kind)
    try:
        value = _value(inner, data, place)
    except ValueError as error:
        # The rule says more than the type it is based on.
        if inner in (int, float, str):
            raise place.refuse(data, rules[-1].text) from error
        raise
    for rule in rules:
        if not rule.holds(value):
            raise place.refuse(data, rule.text)
    return value


def _tuple(arguments: tuple[Any, ...], data: Any, place: _Place) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise place.refuse(data, "a list")
    if arguments[-1] is Ellipsis:
        kinds = [arguments[0]] * len(data)
    else:
        kinds = list(arguments)
        if len(data) != len(kinds):
            raise place.refuse(data, f"a list of {len(kinds)} entries")
    return tuple(
        _value(kind, entry, place.at(position))
        for position, (kind, entry) in enumerate(zip(kinds, data, strict=True))
    )


def _mapping(kind: Any, data: Any, place: _Place) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise place.refuse(data, "a mapping")
    for name in data:
        if not isinstance(name, str) or not name.isprintable():
            raise place.refuse(name, f"a mapping whose keys are texts, each {PRINTABLE}")
    return {name: _value(kind, value, place.inside(name)) for name, value in data.items()}


def _dataclass(kind: Any, data: Any, place: _Place) -> Any:
    if not isinstance(data, Mapping):
        raise place.refuse(data, f"a mapping with the keys {', '.join(_hints(kind))}")
    hints = _hints(kind)
    for name in data:
        if name not in hints:
            raise place.inside(_one_line(name)).error(f"unknown key; {advice(name, hints)}")
    for entry in fields(kind):
        required = entry.default is MISSING and entry.default_factory is MISSING
        if required and entry.name not in data:
            raise place.inside(entry.name).error("missing, must be given")
    values = {name: _value(hints[name], data[name], place.inside(name)) for name in data}
    try:
        return kind(**values)
    except ValueError as error:
        # A rule across several fields: the class names the field, this adds the path to it.
        way = f"{place.key}." if place.key else ""
        raise ValueError(f"{place.file}: {way}{error}") from error


def _scalar(kind: Any, data: Any, place: _Place) -> Any:
    if kind is float and type(data) is int and abs(data) < sys.float_info.max:
        data = float(data)
    if type(data) is not kind:
        names = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
        raise place.refuse(data, names[kind])
    if kind is float and not math.isfinite(data):
        raise place.refuse(data, "a finite number")
    return data


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


def _shown(value: Any) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _one_line(value: Any) -> str:
    return shown(" ".join(str(value).split()))


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice; YAML would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, str | int) else str(key))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes a list that holds no list or mapping in one line."""


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.SequenceNode:
    is_flat = all(not isinstance(entry, list | dict) for entry in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=is_flat)


_Dumper.add_representer(list, _represent_list)
