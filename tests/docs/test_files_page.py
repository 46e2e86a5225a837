"""docs/files.md is what the code says, and leaves no field without a meaning."""

from dataclasses import dataclass
from typing import Literal

from pages import REPOSITORY, check_current

from monta_megatron.common.field_texts import FieldText, field_texts
from monta_megatron.common.rules import PositiveInt, Text
from monta_megatron.common.units import Rate

SCRIPT = REPOSITORY / "scripts" / "files_page.py"
PAGE = REPOSITORY / "docs" / "files.md"


def test_the_page_is_current() -> None:
    check_current(PAGE, SCRIPT)


def test_every_field_has_a_meaning() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if not row.split(" | ")[1].strip()] == []


@dataclass(frozen=True, kw_only=True)
class Inner:
    """One of them.

    Attributes:
        rate: how fast.
    """

    rate: Rate


@dataclass(frozen=True, kw_only=True)
class Outer:
    """All of them.

    Attributes:
        first, second: both, and so much more that
            a second line follows.
        wait_us: how long.
        way: which way.
        inner: the others.

    This is no attribute: of anything.
    """

    first: Text
    second: Text = "x"
    wait_us: PositiveInt | None = None
    way: Literal["up", "down"] = "up"
    inner: tuple[Inner, ...] = ()


def test_texts_of_fields() -> None:
    first, second, wait, way, inner = field_texts(Outer)
    assert first.meaning == second.meaning == "both, and so much more that a second line follows"
    assert first.is_required and not second.is_required and second.default == "x"
    assert (wait.unit, wait.default, wait.rule) == ("microseconds", "none", "an integer >= 1")
    assert (way.rule, way.default) == ("one of up, down", "up")
    assert (inner.meaning, inner.rule, inner.inner) == (
        "the others",
        "a list, each a mapping",
        Inner,
    )
    (rate,) = field_texts(Inner)
    assert isinstance(rate, FieldText) and rate.rule == Rate.RULE and rate.inner is None
