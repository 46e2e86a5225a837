"""Texts of messages: suggestions for unknown names, and one printable line of anything."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name, in lower case, that is most like `name`; None if none is close."""
    return next(iter(get_close_matches(str(name).lower(), list(known), n=1)), None)


def one_of(name: object, known: Iterable[str]) -> str:
    """The rule that `name` breaks: "one of x, y", with " (did you mean x?)" where one is close."""
    known = list(known)
    meant = nearest(name, known)
    return f"one of {', '.join(known)}" + ("" if meant is None else f" (did you mean {meant}?)")


def advice(name: object, known: Iterable[str]) -> str:
    """Suggestion in place of `name`: "did you mean x?", or "known: x, y" where none is close."""
    known = list(known)
    meant = nearest(name, known)
    return f"known: {', '.join(known)}" if meant is None else f"did you mean {meant}?"


def shown(text: object) -> str:
    r"""A text as one line of printable characters: a line break as \n, an escape as \x1b."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in str(text)
    )
