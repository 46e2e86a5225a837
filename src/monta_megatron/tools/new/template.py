"""A file as commented YAML: every field with its meaning, and fields to fill in.

The comments are those of `field_texts`. A key that is set stands as it is; one that may be left
out stands behind a # with what is taken for it, and so does one that somebody has to fill in: the
loader then names all of these in one line. A mapping that may have any keys ends with those that
are only proposed, behind a # and without a value.
"""

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monta_megatron.common import strict_yaml
from monta_megatron.common.field_texts import FieldText, field_texts

WIDTH = 100
TO_FILL_IN = "TO FILL IN"
HOW_TO_READ = (
    "A key behind a # has the value that is taken without it, if any; remove the # to set another."
)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A file that is to be written.

    Attributes:
        text: its content.
        to_fill_in: the keys without which it does not load.
        remarks: key -> what was found or taken for it.
        warnings: what the user has to know of it besides, a line each.
    """

    text: str
    to_fill_in: tuple[str, ...]
    remarks: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """The JSON document, without the file's name."""
        return {"text": self.text, "to_fill_in": self.to_fill_in, "remarks": self.remarks}


def make_template(
    cls: type[Any],
    values: Mapping[str, Any],
    *,
    about: Sequence[str],
    remarks: Mapping[str, str],
    flags: Mapping[str, str],
    left_out: Collection[str] = (),
    proposed: Mapping[str, Mapping[str, str]] | None = None,
) -> Template:
    """The template of a file.

    Args:
        cls: the dataclass that it is read into.
        values: plain data of the keys that are known, nested as in the file.
        about: paragraphs of comment at the top.
        remarks: key with the way to it, such as "links[0].rate" -> a comment on its value.
        flags: key -> the flag that gave its value, for messages.
        left_out: keys that nobody writes by hand.
        proposed: a mapping with the way to it -> keys that it may have, each with a comment.

    Raises:
        ValueError: nothing is to be filled in, and yet it would not load.
    """
    writer = _Writer(remarks, left_out, proposed or {})
    body = list(writer.fields(cls, values, "", "", explain=True))
    missing = tuple(writer.to_fill_in)
    if missing:
        about = [*about, f"{TO_FILL_IN}: {', '.join(missing)}."]
    else:
        _check(cls, values, flags)
    head = [line for text in (*about, HOW_TO_READ) for line in _comment(text, "")]
    return Template(text="\n".join([*head, *body]) + "\n", to_fill_in=missing, remarks=remarks)


def flags_of(names: Collection[str]) -> Mapping[str, str]:
    """Keys that have a flag of the same name -> that flag."""
    return {name: f"--{name.replace('_', '-')}" for name in names}


def _check(cls: type[Any], values: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    file = cls.__name__
    try:
        strict_yaml.build(cls, values, file)
    except ValueError as error:
        key, _, rule = str(error).removeprefix(f"{file}: ").partition(": ")
        raise ValueError(f"{flags.get(key, key)}: {rule}") from error


class _Writer:
    """Writes fields as lines, and collects those that are to be filled in."""

    def __init__(
        self,
        remarks: Mapping[str, str],
        left_out: Collection[str],
        proposed: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.remarks = remarks
        self.left_out = left_out
        self.proposed = proposed
        self.to_fill_in: list[str] = []

    def fields(
        self, cls: type[Any], values: Mapping[str, Any], way: str, indent: str, explain: bool
    ) -> Iterator[str]:
        for entry in field_texts(cls):
            if entry.name in self.left_out:
                continue
            key = f"{way}{entry.name}"
            if explain:
                yield ""
                yield from _comment(f"{entry.meaning} ({entry.rule})", indent)
            if key in self.remarks:
                yield from _comment(self.remarks[key], indent)
            if entry.name in values:
                yield from self.field(entry, values[entry.name], key, indent, explain)
            elif entry.is_required:
                self.to_fill_in.append(key)
                yield f"{indent}#{entry.name}:  # {TO_FILL_IN}"
            elif explain:
                yield f"{indent}#{entry.name}: {_default(entry)}"

    def field(
        self, entry: FieldText, value: Any, key: str, indent: str, explain: bool
    ) -> Iterator[str]:
        if entry.inner is None and not isinstance(value, Mapping):
            yield from _dumped({entry.name: value}, indent)
            return
        yield f"{indent}{entry.name}:"
        if entry.inner is None:
            for name, part in value.items():
                if f"{key}.{name}" in self.remarks:
                    yield from _comment(self.remarks[f"{key}.{name}"], f"{indent}  ")
                yield from _dumped({name: part}, f"{indent}  ")
            for name, text in self.proposed.get(key, {}).items():
                yield from _comment(text, f"{indent}  ")
                yield f"{indent}  #{name}:"
        elif isinstance(value, Mapping):
            yield from self.fields(entry.inner, value, f"{key}.", f"{indent}  ", explain)
        else:
            for position, item in enumerate(value):
                # Comments that hold for all of them stand at the first one.
                lines = self.fields(
                    *(entry.inner, item, f"{key}[{position}].", f"{indent}    "),
                    explain=explain and position == 0,
                )
                yield from _as_item(list(lines), indent)


def _as_item(lines: list[str], indent: str) -> Iterator[str]:
    """Lines of a mapping as an entry of a list: a dash before its first key."""
    first = next(
        place for place, line in enumerate(lines) if line and not line.lstrip().startswith("#")
    )
    yield from lines[:first]
    yield f"{indent}  - {lines[first].lstrip()}"
    yield from lines[first + 1 :]


def _dumped(data: Mapping[str, Any], indent: str) -> list[str]:
    return textwrap.indent(strict_yaml.dump(data), indent).splitlines()


def _comment(text: str, indent: str) -> list[str]:
    prefix = f"{indent}# "
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _default(entry: FieldText) -> str:
    """A default as YAML."""
    if entry.default in ("none", "its defaults"):
        kind = entry.rule.partition(",")[0]
        return {"a list": "[]", "a mapping": "{}"}.get(kind, "null")
    return entry.default
