"""What a user can choose, in one place: names, environment variables, rules.

Each option is a field of Megatron's TransformerConfig, hence a Megatron argument
(`--moe-monta-chain`), hence in Megatron's printed arguments and in its checkpoints. The
environment variable of the same name (MOE_MONTA_CHAIN) gives the default of that argument.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Optional

from monta_megatron.chains import CHAINS

DISPATCHER_TYPE = "monta"
DEFAULT_NUM_CHUNKS = 4


def _integer_or_text(text: str) -> int | str:
    """A number if it is one; what is none stays text, for `Options.of` to refuse in one line."""
    try:
        return int(text)
    except ValueError:
        return text


def _option(help_text: str, convert: Callable[[str], Any] = str) -> Any:
    # Megatron reads help texts from a class's source; these fields are not in its source.
    meta = {"help": help_text, "type": convert}
    return field(default=None, metadata={"argparse_meta": meta})


@dataclass(kw_only=True)
class OptionFields:
    """The fields that a TransformerConfig gains; None means not given.

    Written with `Optional`, which is the form that Megatron's argument factory understands.
    """

    moe_monta_chain: Optional[str] = _option(  # noqa: UP045
        "Chain of the monta token dispatcher: " + ", ".join(CHAINS) + "."
    )
    moe_monta_num_chunks: Optional[int] = _option(  # noqa: UP045
        "Number of chunks that the monta token dispatcher pipelines (default: 4, or 1 "
        "for a serial chain).",
        _integer_or_text,
    )
    moe_monta_ranks_per_node: Optional[int] = _option(  # noqa: UP045
        "Ranks joined by the fast tier, where the launcher does not say it or says it wrong.",
        _integer_or_text,
    )


OPTION_NAMES = tuple(entry.name for entry in fields(OptionFields))


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one dispatcher, resolved and checked.

    Attributes:
        chain: key of `chains.CHAINS`.
        num_chunks: at least 1.
        ranks_per_node: ranks joined by the fast tier, or None where only the launcher knows.
    """

    chain: str = "alltoall_allgather"
    num_chunks: int = DEFAULT_NUM_CHUNKS
    ranks_per_node: int | None = None

    @classmethod
    def of(cls, source: object) -> "Options":
        """The options that `source`, a TransformerConfig or parsed arguments, carries.

        Raises:
            ValueError: one is out of range; the message names option, value and rule.
        """
        given = {
            name.removeprefix("moe_monta_"): getattr(source, name)
            for name in OPTION_NAMES
            if getattr(source, name, None) is not None
        }
        if getattr(CHAINS.get(given.get("chain", "")), "serial", False):
            given.setdefault("num_chunks", 1)
        options = cls(**given)
        if options.chain not in CHAINS:
            raise ValueError(
                f"moe_monta_chain: got {options.chain!r}, must be one of "
                f"{', '.join(CHAINS)}{_nearest(options.chain)}"
            )
        for name in ("num_chunks", "ranks_per_node"):
            value = getattr(options, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"moe_monta_{name}: got {value!r}, must be an integer >= 1")
        if CHAINS[options.chain].serial and options.num_chunks > 1:
            raise ValueError(
                f"moe_monta_num_chunks: got {options.num_chunks}, must be 1 for the serial chain "
                f"{options.chain}; alltoall_allgather is its pipelined form"
            )
        return options


def defaults_from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Defaults of the option fields, from MOE_MONTA_CHAIN and its like; None where unset."""
    defaults: dict[str, Any] = {}
    for entry in fields(OptionFields):
        text = environ.get(entry.name.upper())
        convert = entry.metadata["argparse_meta"]["type"]
        defaults[entry.name] = convert(text) if text else None
    return defaults


def _nearest(name: str) -> str:
    matches = get_close_matches(str(name), CHAINS, n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""
