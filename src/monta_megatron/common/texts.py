"""Texts that reach a shell, a log or a terminal: what they may hold, and how each is written there.

A line break in a value would begin a line of its own in a script or a log, and an escape sequence
would make a terminal show what is not there. Such texts are refused where they are read; what is
only shown, such as the name of a file that does not exist, has them written out.
"""

import shlex
from collections.abc import Iterable

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
