"""Chains as plain data: what moves where, with no torch."""

from monta_megatron.chains.allgather import ALLGATHER
from monta_megatron.chains.alltoall import ALLTOALL
from monta_megatron.chains.alltoall_allgather import ALLTOALL_ALLGATHER
from monta_megatron.chains.alltoall_dedup import ALLTOALL_DEDUP
from monta_megatron.chains.chain import BoundChain, Chain, Counts, TokenCounts
from monta_megatron.chains.hierarchical_allgather import HIERARCHICAL_ALLGATHER
from monta_megatron.chains.hierarchical_alltoall import HIERARCHICAL_ALLTOALL

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

__all__ = ["CHAINS", "BoundChain", "Chain", "Counts", "TokenCounts"]
