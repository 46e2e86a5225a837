"""YAML into frozen dataclasses and back, strictly.

The content of a file is declared once, as the annotations of a dataclass: an unknown key, a missing
one, a wrong type or a value that breaks its rule is a one-line `ValueError` that names the file and
line, the path of the key, the value and the rule. A class with `from_text` and `RULE`, such as a
rate, is a text there, which its `str` writes.

    @dataclass(frozen=True, kw_only=True)
    class Link:
        alpha_us: PositiveFloat
        note: str | None = None

    links.yaml:2: links[0].alpha_us: got -3, must be a number > 0

Our own, because msgspec and pydantic say neither the line nor the value nor the key that was meant,
and an installation with `pip install --no-deps` would lack them.
"""

import math
import re
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from monta_megatron.common.files import read_text
from monta_megatron.common.rules import SCALARS
from monta_megatron.common.text import PRINTABLE, advice, one_of, shown

T = TypeVar("T")

# Characters of a value, and of YAML's own errors, that a message shows.
LONGEST_SHOWN = 100


def load(cls: type[T], path: str | Path) -> T:
    """Read a YAML file into a dataclass.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    data, lines = _read(path)
    value: T = _value(cls, data, _Place(str(path), "", lines))
    return value


def read(path: str | Path) -> Any:
    """Read the plain data in a YAML file, unchecked.

    Raises:
        ValueError: the file cannot be read, or is not plain YAML.
    """
    return _read(path)[0]


def build(cls: type[T], data: Any, file: str) -> T:
    """Check plain data against a dataclass and make it.

    Args:
        cls: a dataclass.
        data: plain data, as read from YAML.
        file: for messages.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    value: T = _value(cls, data, _Place(file, "", {}))
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
    """Place in a file: the path of a key, and the lines of all keys."""

    file: str
    key: str
    lines: Mapping[str, int]

    def inside(self, name: object) -> "_Place":
        return _Place(self.file, _path(self.key, name), self.lines)

    def error(self, message: str) -> ValueError:
        line = self.lines.get(self.key)
        where = self.file if line is None else f"{self.file}:{line}"
        return ValueError(": ".join(part for part in (where, self.key, message) if part))

    def refuse(self, value: Any, rule: str) -> ValueError:
        return self.error(f"got {_short(repr(value))}, must be {rule}")


def _path(key: str, name: object) -> str:
    """The path of an entry: its name, or its position in a list."""
    if isinstance(name, int):
        return f"{key}[{name}]"
    return f"{key}.{_short(name)}" if key else _short(name)


def _value(kind: Any, data: Any, place: _Place) -> Any:
    """`data` as `kind`: a scalar, a union with None, a literal, a tuple, a mapping, a dataclass."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin is Annotated:
        inner, rule = arguments
        # The rule says more than the type that it is based on.
        is_scalar = inner in SCALARS
        value = _scalar(inner, data, place, rule.text) if is_scalar else _value(inner, data, place)
        if not rule.holds(value):
            raise place.refuse(data, rule.text)
        return value
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
        if not isinstance(data, Mapping):
            raise place.refuse(data, "a mapping")
        return {name: _value(arguments[1], data[name], place.inside(name)) for name in data}
    if hasattr(kind, "from_text"):
        with suppress(ValueError, AttributeError):
            return kind.from_text(data)
        raise place.refuse(data, kind.RULE)
    if is_dataclass(kind):
        return _dataclass(kind, data, place)
    return _scalar(kind, data, place, SCALARS[kind])


def _scalar(kind: Any, data: Any, place: _Place, rule: str) -> Any:
    if kind is float and type(data) is int:
        data = float(data)
    if type(data) is not kind:
        raise place.refuse(data, rule)
    if kind is float and not math.isfinite(data):
        raise place.refuse(data, "a finite number")
    return data


def _tuple(arguments: tuple[Any, ...], data: Any, place: _Place) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise place.refuse(data, "a list")
    kinds = arguments[:1] * len(data) if arguments[-1] is Ellipsis else arguments
    if len(kinds) != len(data):
        raise place.refuse(data, f"a list of {len(kinds)} entries")
    return tuple(
        _value(kind, entry, place.inside(position))
        for position, (kind, entry) in enumerate(zip(kinds, data, strict=True))
    )


def _dataclass(kind: Any, data: Any, place: _Place) -> Any:
    hints = _hints(kind)
    if not isinstance(data, Mapping):
        raise place.refuse(data, f"a mapping with the keys {', '.join(hints)}")
    for name in data:
        if name not in hints:
            raise place.inside(name).error(f"unknown key; {advice(name, hints)}")
    missing = [
        place.inside(entry.name).key
        for entry in fields(kind)
        if entry.default is MISSING and entry.default_factory is MISSING and entry.name not in data
    ]
    if missing:
        raise place.error(f"{', '.join(missing)}: missing, must be given")
    values = {name: _value(hints[name], data[name], place.inside(name)) for name in data}
    try:
        return kind(**values)
    except ValueError as error:
        # A rule across several fields: the class names the field, this adds the path to it.
        name, colon, message = str(error).partition(": ")
        raise (place.inside(name).error(message) if colon else place.error(name)) from error


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


def _short(value: object) -> str:
    """A text in one printable line of about that many characters at most."""
    text = shown(" ".join(str(value).split()))
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _read(path: str | Path) -> tuple[Any, dict[str, int]]:
    """The plain data in a file, and the line of each key by its path."""
    loader = _Loader(read_text(path, "YAML"))
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        return loader.construct_document(node), dict(_lines(node, ""))
    except yaml.MarkedYAMLError as error:
        where = path if error.problem_mark is None else f"{path}:{error.problem_mark.line + 1}"
        raise ValueError(f"{where}: is no plain YAML: {_short(error.problem)}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: is no plain YAML: {_short(error)}") from error


def _lines(node: yaml.Node, key: str) -> Iterator[tuple[str, int]]:
    entries: list[tuple[object, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        entries = [(name.value, name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        entries = [(position, value, value) for position, value in enumerate(node.value)]
    for name, place, value in entries:
        path = _path(key, name)
        yield path, place.start_mark.line + 1
        yield from _lines(value, path)


class _Loader(yaml.SafeLoader):
    """Reads YAML whose meaning cannot surprise.

    A key that is written twice is refused; YAML would silently take the last one. So is a text that
    a script or a log cannot hold in one line. 4:00:00 and 010 are texts, and 1e3 is a number; YAML
    1.1 would take them for 14400, 8 and a text.
    """

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if isinstance(node.value, str) and not node.value.isprintable():
            raise _refused(f"got {node.value!r}, must be {PRINTABLE}", node)
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                raise _refused("a key must be a text, written once", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _refused(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)",
    "tag:yaml.org,2002:float": r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Writes a list that holds no list or mapping in one line."""


# The dumper quotes a text that looks like a number.
for _tag, _pattern in _NUMBERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"({_pattern})$"), [*"-+0123456789."])


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.SequenceNode:
    is_flat = all(not isinstance(entry, list | dict) for entry in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=is_flat)


_Dumper.add_representer(list, _represent_list)
