"""The budgets that communicators of a training have here; apart from what needs torch."""

import os
from collections.abc import Mapping

from monta_megatron.chains.layout import DEFAULT_CTAS, Ctas


def ctas_of_environment(
    given: Mapping[str, int | None], environ: Mapping[str, str] = os.environ
) -> Ctas:
    """The budgets of a training that is started here.

    Args:
        given: "rail", "node" -> a budget that goes before the environment's; None for none.
        environ: MOE_MONTA_RAIL_CTAS, MOE_MONTA_NODE_CTAS, and MOE_MONTA_MAX_CTAS for both.

    Raises:
        ValueError: a variable is no integer >= 1.
    """

    def read(name: str) -> int | None:
        variable = f"MOE_MONTA_{name.upper()}_CTAS"
        text = environ.get(variable)
        if not text:
            return None
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{variable}: got {text!r}, must be an integer >= 1")
        return int(text)

    both = read("max")
    rail, node = (
        given.get(name) or read(name) or both or default
        for name, default in DEFAULT_CTAS._asdict().items()
    )
    return Ctas(rail=rail, node=node)
