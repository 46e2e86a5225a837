"""`alltoall`: stock's order of stages, one after the other, in one chunk.

    A2A(EP) then AG(ETP) then Permute (into expert order)

The plainest chain: it wins on one node, where messages are tiny, and at top-1. Its
stages are those of `alltoall_allgather`, which pipelines them.
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
