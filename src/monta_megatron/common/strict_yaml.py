"""YAML into frozen dataclasses and back, strictly.

The content of a file is declared once, as the annotations of a dataclass: an unknown key, a missing
one, a wrong type or a value that breaks its rule is a one-line `ValueError` that names the file,
the path of the key, the value and the rule. Tags, some of which make Python objects, are refused,
and so is a file that would take long to read. A class with `from_text` and `RULE`, such as a rate,
is a text there, which its `str` writes.

    @dataclass(frozen=True, kw_only=True)
    class Link:
        alpha_us: PositiveFloat
        note: str | None = None

    links.yaml: links[0].alpha_us: got -3, must be a number > 0

Our own, because msgspec and pydantic say neither the value nor all keys that are missing nor the
key that was meant, and an installation with `pip install --no-deps` would lack them.
"""

import math
import re
import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from monta_megatron.common.files import read_text
from monta_megatron.common.rules import SCALARS
from monta_megatron.common.text import PRINTABLE, advice, one_of, shown

T = TypeVar("T")

# Characters of a value, and of what YAML's own errors say, that an error shows.
LONGEST_VALUE = 60
LONGEST_PROBLEM = 200
# Missing keys that an error names.
MOST_SHOWN = 20
# Beyond these a file is refused before it takes a second. The largest real ones, calibrations and
# plans of thousands of ranks, hold half of it.
MOST_BYTES = 250_000
MOST_VALUES = 10_000
MOST_LEVELS = 20


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
    text = read_text(path, "YAML", MOST_BYTES)
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ValueError(
            f"{path}: is no plain YAML{where}: {_short(error.problem, LONGEST_PROBLEM)}"
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{path}: is no plain YAML: {_short(error, LONGEST_PROBLEM)}") from error


def build(cls: type[T], data: Any, file: str) -> T:
    """Check plain data against a dataclass and make it.

    Args:
        cls: a dataclass.
        data: plain data, as read from YAML.
        file: for messages.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    place = _Place(file, "")
    value: T = _value(cls, data, place)
    if place.missing:
        num_more = len(place.missing) - MOST_SHOWN
        keys = ", ".join(place.missing[:MOST_SHOWN]) + (f" and {num_more} more" * (num_more > 0))
        raise _Place(file, keys).error("missing, must be given")
    return value


def dump(instance: Any) -> str:
    """A dataclass as YAML that `load` reads back to an equal one; defaults are written too."""
    return yaml.dump(plain(instance), Dumper=_Dumper, sort_keys=False, width=100)


def plain(value: Any) -> Any:
    """A dataclass as dictionaries, lists and scalars."""
    if hasattr(type(value), "from_text"):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


@dataclass(frozen=True)
class _Place:
    """Place in a file: the key, and the missing keys that were met in it so far."""

    file: str
    key: str
    missing: list[str] = field(default_factory=list)

    def inside(self, name: object) -> "_Place":
        name = _short(name)
        return _Place(self.file, f"{self.key}.{name}" if self.key else name, self.missing)

    def at(self, position: int) -> "_Place":
        return _Place(self.file, f"{self.key}[{position}]", self.missing)

    def error(self, message: str) -> ValueError:
        return ValueError(": ".join(part for part in (self.file, self.key, message) if part))

    def refuse(self, value: Any, rule: str) -> ValueError:
        return self.error(f"got {_short(repr(value))}, must be {rule}")


def _value(kind: Any, data: Any, place: _Place) -> Any:
    """`data` as `kind`: a scalar, a union with None, a literal, a tuple, a mapping, a dataclass."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(data, str) and not data.isprintable():
        raise place.refuse(data, PRINTABLE)
    if kind is Any:
        if isinstance(data, list):
            return list(_tuple((Any, ...), data, place))
        return _mapping(Any, data, place) if isinstance(data, Mapping) else data
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
    if hasattr(kind, "from_text"):
        return _from_text(kind, data, place)
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
            raise place.refuse(data, rules[-1].text + _number_as_text(inner, data)) from error
        raise
    for rule in rules:
        if not rule.holds(value):
            raise place.refuse(data, rule.text)
    return value


def _tuple(arguments: tuple[Any, ...], data: Any, place: _Place) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise place.refuse(data, "a list")
    kinds = arguments[:1] * len(data) if arguments[-1] is Ellipsis else arguments
    if len(kinds) != len(data):
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
    hints = _hints(kind)
    if not isinstance(data, Mapping):
        raise place.refuse(data, f"a mapping with the keys {', '.join(hints)}")
    for name in data:
        if name not in hints:
            raise place.inside(name).error(f"unknown key; {advice(name, hints)}")
    place.missing.extend(
        place.inside(entry.name).key
        for entry in fields(kind)
        if entry.default is MISSING and entry.default_factory is MISSING and entry.name not in data
    )
    values = {name: _value(hints[name], data[name], place.inside(name)) for name in data}
    # The keys that are missing are named together, when all have been met.
    if place.missing:
        return None
    try:
        return kind(**values)
    except ValueError as error:
        # A rule across several fields: the class names the field, this adds the path to it.
        way = f"{place.key}." if place.key else ""
        raise ValueError(f"{place.file}: {way}{error}") from error


def _from_text(kind: Any, data: Any, place: _Place) -> Any:
    if isinstance(data, str):
        with suppress(ValueError):
            return kind.from_text(data)
    raise place.refuse(data, kind.RULE)


def _scalar(kind: Any, data: Any, place: _Place) -> Any:
    if kind is float and type(data) is int and abs(data) < sys.float_info.max:
        data = float(data)
    if type(data) is not kind:
        raise place.refuse(data, SCALARS[kind] + _number_as_text(kind, data))
    if kind is float and not math.isfinite(data):
        raise place.refuse(data, "a finite number")
    return data


def _number_as_text(kind: Any, data: Any) -> str:
    """Spelling for a number that YAML takes for a text, such as 1e2; "" if it is none.

    YAML 1.1, which this reads, knows 1.0e+2 alone.
    """
    with suppress(ValueError):
        if isinstance(data, str) and kind in (int, float) and math.isfinite(float(data)):
            number = Decimal(repr(float(data))).normalize()
            return f"; to YAML this is a text, write {number:f}"
    return ""


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


def _short(value: object, most: int = LONGEST_VALUE) -> str:
    """A text in one printable line of about that many characters at most."""
    text = shown(" ".join(str(value).split()))
    return text if len(text) <= most else f"{text[:most]}..."


class _Loader(yaml.SafeLoader):
    """Reads YAML whose meaning cannot surprise, and no more of it than the limits allow.

    A key that is written twice is refused; YAML would silently take the last one. 4:00:00 and 010
    are texts; YAML 1.1 would take them for 14400 and 8.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_levels = 0
        self._num_values = 0
        self._num_values_of: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Count values as if those that an alias repeats were written out, and levels."""
        event: Any = self.peek_event()
        if self.check_event(yaml.AliasEvent):
            self._count(self._num_values_of.get(event.anchor, 1), event)
            return super().compose_node(parent, index)
        if event.tag is not None:
            raise _refused(f"tag {event.tag} is not known here; quotes make a text", event)
        before = self._num_values
        self._count(1, event)
        self._num_levels += 1
        if self._num_levels > MOST_LEVELS:
            raise _refused(f"nested too deeply, must be at most {MOST_LEVELS} levels", event)
        node = super().compose_node(parent, index)
        self._num_levels -= 1
        if event.anchor is not None:
            self._num_values_of[event.anchor] = self._num_values - before
        return node

    def _count(self, num_values: int, event: Any) -> None:
        self._num_values += num_values
        if self._num_values > MOST_VALUES:
            raise _refused(
                f"too many values, must be at most {MOST_VALUES:,}, those that an alias repeats "
                "included",
                event,
            )

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        # Python refuses to write out the longest ones, in an error too.
        if value.bit_length() > 63:
            raise _refused("an integer must have at most 63 bits", node)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refused("a key must be a text", key_node)
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise _refused("<< is not known here, its keys must be written out", key_node)
            key = self.construct_object(key_node)
            if key in seen:
                raise _refused(f"key {key!r} is written twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _refused(problem: str, there: Any) -> yaml.MarkedYAMLError:
    """The error for an event or a node."""
    return yaml.constructor.ConstructorError(None, None, problem, there.start_mark)


_NUMBERS = {
    "tag:yaml.org,2002:float": r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"({_pattern})$"), [*"-+0123456789."])


class _Dumper(yaml.SafeDumper):
    """Writes a list that holds no list or mapping in one line."""


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.SequenceNode:
    is_flat = all(not isinstance(entry, list | dict) for entry in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=is_flat)


_Dumper.add_representer(list, _represent_list)
