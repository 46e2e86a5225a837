"""Chains as plain data, with no torch."""

from collections.abc import Sequence

from monta_megatron.chains.allgather import ALLGATHER
from monta_megatron.chains.alltoall import ALLTOALL
from monta_megatron.chains.alltoall_allgather import ALLTOALL_ALLGATHER
from monta_megatron.chains.alltoall_dedup import ALLTOALL_DEDUP
from monta_megatron.chains.chain import BoundChain, Chain, ChainCounts, Counts, TokenCounts
from monta_megatron.chains.hierarchical_allgather import HIERARCHICAL_ALLGATHER
from monta_megatron.chains.hierarchical_alltoall import HIERARCHICAL_ALLTOALL
from monta_megatron.common.errors import UserError
from monta_megatron.common.text import one_of

CHAINS: dict[str, Chain] = {
    chain.name: chain
    for chain in (
        ALLTOALL,
        ALLGATHER,
        ALLTOALL_ALLGATHER,
        ALLTOALL_DEDUP,
        HIERARCHICAL_ALLGATHER,
        HIERARCHICAL_ALLTOALL,
    )
}

# Number of chunks of a chain that is given without one.
DEFAULT_NUM_CHUNKS = 4

__all__ = [
    "CHAINS",
    "DEFAULT_NUM_CHUNKS",
    "BoundChain",
    "Chain",
    "ChainCounts",
    "Counts",
    "TokenCounts",
    "check_chain",
    "chunks_of",
]


def check_chain(name: str, field: str, also: Sequence[str] = ()) -> None:
    """Check the name of a chain.

    Args:
        name: the name.
        field: of the message, such as an option.
        also: other accepted values.

    Raises:
        UserError: there is no such chain.
    """
    known = (*also, *CHAINS)
    if name not in known:
        raise UserError(f"{field}: got {name!r}, must be {one_of(name, known)}")


def chunks_of(chain: Chain, num_chunks: int | None, field: str) -> int:
    """Number of chunks of a chain, with its default.

    Args:
        chain: the chain.
        num_chunks: at least 1; None for the default.
        field: of the message, such as an option.

    Raises:
        UserError: the chain is serial and `num_chunks` is above 1.
    """
    if num_chunks is None:
        return 1 if chain.serial else DEFAULT_NUM_CHUNKS
    if chain.serial and num_chunks > 1:
        raise UserError(
            f"{field}: got {num_chunks}, must be 1 for the serial chain {chain.name}; "
            f"{ALLTOALL_ALLGATHER.name} is its pipelined form"
        )
    return num_chunks
