"""Descriptions of a file's fields, from the dataclass that it is read into.

The meaning comes from the `Attributes:` of the docstring, rule and default from the annotation, the
unit from the name: docs/files.md, the comments of `monta new` and its flags say the same.
"""

import inspect
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from monta_megatron.common.rules import SCALARS, Rule

# A word of a field's name -> the unit that it stands for.
UNITS = {
    "us": "microseconds",
    "bytes": "bytes",
    "gb": "GB (1e9 bytes)",
    "billions": "1e9",
    "minutes": "minutes",
    "seconds": "seconds",
}


@dataclass(frozen=True, kw_only=True)
class FieldText:
    """One field of a file.

    Attributes:
        name: its key.
        meaning: what it says, without a full stop.
        unit: of its number, or "".
        rule: what it has to be.
        default: what stands for it where it is missing; "required" if it must not be.
        inner: the dataclass that it is, or that each of its entries is; None for neither.
    """

    name: str
    meaning: str
    unit: str
    rule: str
    default: str
    inner: type[Any] | None

    @property
    def is_required(self) -> bool:
        """Whether the file must have it."""
        return self.default == "required"


def field_texts(cls: type[Any]) -> Iterator[FieldText]:
    """The fields of a dataclass, in its order."""
    described, hints = meanings(cls), get_type_hints(cls, include_extras=True)
    for entry in fields(cls):
        units = [UNITS[word] for word in entry.name.split("_") if word in UNITS]
        default = entry.default
        if default is MISSING and entry.default_factory is not MISSING:
            default = entry.default_factory()
        yield FieldText(
            name=entry.name,
            meaning=described.get(entry.name, ""),
            unit=units[0] if units else "",
            rule=rule_of(hints[entry.name]),
            default=_default_text(default),
            inner=_inner(hints[entry.name]),
        )


def meanings(cls: type[Any]) -> dict[str, str]:
    """Field -> its text in the `Attributes:` of a docstring, or of a base's."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, block = (inspect.getdoc(base) or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \S)", block.split("\n\n")[0]):
            names, _, meaning = " ".join(entry.split()).partition(": ")
            texts |= {name: meaning.rstrip(".") for name in names.split(", ")}
    return texts


def rule_of(kind: Any) -> str:
    """Rule for values of an annotated type, in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        rules = [rule.text for rule in arguments[1:] if isinstance(rule, Rule)]
        return rules[-1] if rules else rule_of(arguments[0])
    if origin in (Union, types.UnionType):
        return rule_of(_without_none(kind))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        number = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
        return f"a list{number}, each {rule_of(arguments[0])}"
    if origin is Mapping:
        return f"a mapping, each value {rule_of(arguments[1])}"
    if hasattr(kind, "from_text"):
        return str(kind.RULE)
    return "a mapping" if is_dataclass(kind) else SCALARS[kind]


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    (inner,) = (argument for argument in get_args(kind) if argument is not type(None))
    return inner


def _inner(kind: Any) -> type[Any] | None:
    kind = _without_none(kind)
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    return kind if is_dataclass(kind) and not hasattr(kind, "from_text") else None  # type: ignore[return-value]


def _default_text(default: Any) -> str:
    if default is MISSING:
        return "required"
    if is_dataclass(default):
        return "its defaults"
    if default is None or default == () or default == {}:
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)
