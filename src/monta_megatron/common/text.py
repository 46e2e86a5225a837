"""Names and texts in messages: suggestions for unknown names, escaping for shells and logs.

A line break in a value would begin a line of its own in a script or a log, and an escape sequence
would make a terminal show text that is not there. Such texts are refused where they are read; names
that are only shown, such as that of a missing file, are printed escaped.
"""

import shlex
from collections.abc import Iterable
from difflib import get_close_matches

# Letters that two names have to start with to be alike.
LEAST_START = 3


def same_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs from `name` in case, `-` or `_`, or in its owner alone.

    An owner is what stands before a slash: "Qwen/Qwen3-30B-A3B" is "qwen3_30b_a3b".
    """
    plain = _plain(name.rpartition("/")[2])
    return next((candidate for candidate in known if _plain(candidate) == plain), None)


def _plain(name: str) -> str:
    return name.casefold().replace("-", "_")


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, or else starts as it does; None if none does."""
    text, known = str(name), list(known)
    # A name that is too short or too long differs in too many letters to be close.
    alike = [
        candidate
        for candidate in known
        if min(len(text), len(candidate)) >= LEAST_START
        and (candidate.startswith(text) or text.startswith(candidate))
    ]
    return next(iter([*get_close_matches(text, known, n=1), *alike]), None)


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


PRINTABLE = "one line of printable characters"


def check_printable(text: str, field: str) -> str:
    r"""The text, if it is one line of printable characters.

    Args:
        text: what was given.
        field: where, for the message.

    Raises:
        ValueError: it holds a line break, an escape, NUL, or what is no character at all.
    """
    if not text.isprintable():
        raise ValueError(f"{field}: got {text!r}, must be {PRINTABLE}")
    return text


def shown(text: object) -> str:
    r"""A text as one line of printable characters: a line break as \n, an escape as \x1b."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in str(text)
    )


def quoted(text: str) -> str:
    """A text as one word of a shell.

    Raises:
        ValueError: it is not one line of printable characters.
    """
    return shlex.quote(check_printable(text, "a word of a script"))


def command_line(words: Iterable[str]) -> str:
    """Words as one line that a shell reads as the same words.

    Raises:
        ValueError: a word is not one line of printable characters.
    """
    return " ".join(map(quoted, words))
