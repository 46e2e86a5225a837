"""The chain of docs/adding_a_chain.md, from the page itself, on the ranks of a pool."""

import re
from pathlib import Path

from monta_megatron.chains import CHAINS

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_chain.md"


def code() -> tuple[str, str]:
    """The page's chain and the page's test."""
    chain, test = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return chain, test


def add() -> None:
    """What the page says to do in `chains/__init__.py`."""
    namespace: dict[str, object] = {}
    exec(code()[0], namespace)
    chain = namespace["CHAIN"]
    CHAINS[chain.name] = chain


def remove() -> None:
    """Leave the other tests alone."""
    CHAINS.pop("rail_allgather", None)
