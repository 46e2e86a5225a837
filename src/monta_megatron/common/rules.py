"""Rules of values: annotated types that `strict_yaml` checks, `require`, and a stable hash."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any


def hash_of(values: Mapping[str, Any]) -> int:
    """63 bits of a mapping of plain values, the same in every process."""
    text = json.dumps(values, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Rule:
    """A rule for a value, beyond its type.

    Attributes:
        text: what the user reads after "must be".
        holds: whether a value satisfies it.
    """

    text: str
    holds: Callable[[Any], bool]


SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
PositiveInt = Annotated[int, Rule("an integer >= 1", lambda value: value >= 1)]
PositiveFloat = Annotated[float, Rule("a number > 0", lambda value: value > 0)]
NonNegativeFloat = Annotated[float, Rule("a number >= 0", lambda value: value >= 0)]
Text = Annotated[str, Rule("a text that is not empty", lambda value: value.strip() != "")]


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Refuse a value that breaks a rule, such as one between several fields of a dataclass.

    Args:
        holds: whether it satisfies it.
        name: the field, for the message; `strict_yaml` puts the path to the dataclass before it.
        value: what it is.
        rule: what the user reads after "must".

    Raises:
        ValueError: the rule does not hold.
    """
    if not holds:
        raise ValueError(f"{name}: got {value}, must {rule}")
