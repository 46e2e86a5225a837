"""YAML into frozen dataclasses and back, strictly.

The annotations of a dataclass declare the content of a file. An unknown key, a missing one, a wrong
type or a value that breaks its rule is a one-line `UserError` that names the file and line, the
path of the key, the value and the rule. A class with `from_text` and `RULE`, such as a rate, is a
text in the file.

    @dataclass(frozen=True, kw_only=True)
    class Link:
        alpha_us: PositiveFloat
        note: str | None = None

    links.yaml:2: links[0].alpha_us: got -3, must be a number > 0
"""

import re
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from monta_megatron.common.errors import UserError
from monta_megatron.common.files import read_text
from monta_megatron.common.rules import SCALARS
from monta_megatron.common.text import advice, one_of

T = TypeVar("T")


def load(cls: type[T], path: str | Path) -> T:
    """Read a YAML file into a dataclass.

    Raises:
        UserError: one line that names the file, the key, the value and the rule.
    """
    data, lines = _read(path)
    return build(cls, data, str(path), lines)


def read(path: str | Path) -> Any:
    """Read the plain data in a YAML file, unchecked.

    Raises:
        UserError: the file cannot be read, or is not plain YAML.
    """
    return _read(path)[0]


def build(cls: type[T], data: Any, file: str, lines: Mapping[str, int] | None = None) -> T:
    """Check plain data against a dataclass and make it.

    Args:
        cls: a dataclass.
        data: plain data, as read from YAML.
        file: for messages.
        lines: where each key is in the file, by its path.

    Raises:
        UserError: one line that names the file, the key, the value and the rule.
    """
    try:
        value: T = _value(cls, data, "")
    except _WrongValueError as error:
        key, message = error.args
        written = key
        # A missing key is in the mapping that lacks it.
        while lines and written and written not in lines:
            written = written.rpartition(".")[0]
        where = f"{file}:{lines[written]}" if lines and written else file
        raise UserError(": ".join(filter(None, (where, key, message)))) from None
    return value


def dump(instance: Any) -> str:
    """A dataclass, or plain data, as YAML that `load` reads back; defaults are written too."""
    return yaml.dump(plain(instance), Dumper=_Dumper, sort_keys=False, width=100)


def plain(value: Any) -> Any:
    """A dataclass as dictionaries, lists and scalars."""
    if hasattr(type(value), "from_text"):
        return str(value)
    if is_dataclass(value):
        entries = (entry.name for entry in fields(value) if entry.init)
        return {name: plain(getattr(value, name)) for name in entries}
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


class _WrongValueError(Exception):
    """A value that breaks a rule: the path of its key, and the message."""


def _refused(key: str, value: Any, rule: str) -> _WrongValueError:
    return _WrongValueError(key, f"got {value!r:.100}, must be {rule}")


def _path(key: str, name: object) -> str:
    """The path of an entry: its name, or its position in a list."""
    if isinstance(name, int):
        return f"{key}[{name}]"
    return f"{key}.{name}" if key else str(name)


def _value(kind: Any, data: Any, key: str, rule: str | None = None) -> Any:
    """`data` as a type or annotation; `rule` is that of an annotated scalar, for messages."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin is Annotated:
        inner, annotated = arguments
        value = _value(inner, data, key, annotated.text)
        if not annotated.holds(value):
            raise _refused(key, data, annotated.text)
        return value
    if origin in (Union, types.UnionType):
        # Only `X | None`: a value that could be read in two ways would have no single rule to name.
        return None if data is None else _value(arguments[0], data, key)
    if origin is Literal:
        if data not in arguments:
            raise _refused(key, data, one_of(data, [str(each) for each in arguments]))
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise _refused(key, data, "a list")
        kinds = arguments[:1] * len(data) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(data):
            raise _refused(key, data, f"a list of {len(kinds)} entries")
        entries = enumerate(zip(kinds, data, strict=True))
        return tuple(_value(each, entry, _path(key, place)) for place, (each, entry) in entries)
    if origin is Mapping:
        if not isinstance(data, Mapping):
            raise _refused(key, data, "a mapping")
        return {name: _value(arguments[1], data[name], _path(key, name)) for name in data}
    if hasattr(kind, "from_text"):
        with suppress(ValueError, AttributeError):
            return kind.from_text(data)
        raise _refused(key, data, kind.RULE)
    if is_dataclass(kind):
        return _dataclass(kind, data, key)
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise _refused(key, data, rule or SCALARS[kind])
    return data


def _dataclass(kind: Any, data: Any, key: str) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    entries = [entry for entry in fields(kind) if entry.init]
    names = [entry.name for entry in entries]
    if not isinstance(data, Mapping):
        raise _refused(key, data, f"a mapping with the keys {', '.join(names)}")
    for name in data:
        if name not in names:
            raise _WrongValueError(_path(key, name), f"unknown key; {advice(name, names)}")
    required = [each.name for each in entries if each.default is each.default_factory is MISSING]
    if missing := ", ".join(name for name in required if name not in data):
        raise _WrongValueError(_path(key, missing), "missing, must be given")
    values = {name: _value(hints[name], data[name], _path(key, name)) for name in data}
    try:
        return kind(**values)
    except UserError as error:
        # A rule across several fields: the class names the field, this adds the path to it.
        name, colon, message = str(error).partition(": ")
        raise _WrongValueError(_path(key, name) if colon else key, message or name) from None


def _read(path: str | Path) -> tuple[Any, dict[str, int]]:
    """The plain data in a file, and the line of each key by its path."""
    loader = _Loader(read_text(path, "YAML"))
    try:
        node = loader.get_single_node()
        data = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = path if mark is None else f"{path}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"{where}: is no plain YAML: {problem}") from error
    lines: dict[str, int] = {}
    for key, line in _lines(node, ""):
        if key in lines:
            raise UserError(f"{path}:{line}: {key}: written twice, must be given once")
        lines[key] = line
    return data, lines


def _lines(node: yaml.Node | None, key: str) -> Iterator[tuple[str, int]]:
    """The line of each key in a node, by its path."""
    is_mapping = isinstance(node, yaml.MappingNode)
    for position, entry in enumerate(node.value if isinstance(node, yaml.CollectionNode) else ()):
        name, value = entry if is_mapping else (entry, entry)
        path = _path(key, name.value if is_mapping else position)
        yield path, name.start_mark.line + 1
        yield from _lines(value, path)


class _Loader(yaml.SafeLoader):
    """Takes 4:00:00, 010 and a date for texts and 1e3 for a number, as an author means them.

    For YAML 1.1 they are 14400, 8, a date and a text.
    """


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or `_Loader` takes for something else."""


_Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0].endswith((":bool", ":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in (
    ("int", re.compile(r"[-+]?(0|[1-9][0-9_]*)$")),
    ("float", re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$")),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, [*"-+0123456789."])
