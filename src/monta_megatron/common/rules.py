"""Rules of values: annotated types that `strict_yaml` checks, `require`, and a stable hash."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple


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


def is_scalar(value: Any) -> bool:
    """Whether a value is a text or a number; true and false are none."""
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _is_argument(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) > 0 and all(map(is_scalar, value))
    return isinstance(value, bool) or is_scalar(value)


# An argument of Megatron: true is a flag without a value, false leaves the argument out, a list is
# several values.
ArgumentValue = Annotated[
    Any, Rule("a text, a number, true, false, or a list of texts and numbers", _is_argument)
]


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Refuse a value that breaks a rule, such as one between several fields of a dataclass.

    Args:
        holds: whether it satisfies it.
        name: the field, for the message; `build` puts the path to the dataclass before it.
        value: what it is.
        rule: what the user reads after "must".

    Raises:
        ValueError: the rule does not hold.
    """
    if not holds:
        raise ValueError(f"{name}: got {value}, must {rule}")


class Unsupported(NamedTuple):
    """A setting that is not supported.

    Attributes:
        setting: a field of TransformerConfig.
        reason: why not, and what to do.
        condition: holds for a configuration that asks for it; None if the field is true then.
    """

    setting: str
    reason: str
    condition: Callable[[Any], bool] | None = None

    def is_set(self, config: Any) -> bool:
        """Whether a configuration asks for it."""
        if self.condition is not None:
            return self.condition(config)
        return bool(getattr(config, self.setting, False))
