"""`alltoall`: the stages of stock's dispatcher, serially, in one chunk.

    A2A(EP) then AG(ETP) then Permute (into expert order)

It wins on one node, where messages are tiny, and at top-1. `alltoall_allgather` pipelines the same
stages.
"""

from monta_megatron.chains.alltoall_allgather import ALLTOALL_ALLGATHER, bind_stages
from monta_megatron.chains.chain import Chain

ALLTOALL = Chain(
    name="alltoall",
    rows="permuted tokens",
    stages=ALLTOALL_ALLGATHER.stages,
    bind_stages=bind_stages,
    serial=True,
)
