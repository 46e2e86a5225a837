"""`alltoall`: stock's order of stages, one after the other, in one chunk.

    A2A(EP) then AG(ETP) then Permute (into expert order)

The plainest chain: it wins on one node, where messages are tiny, and at top-1. Its
stages are those of `alltoall_allgather`, which pipelines them.
"""

from monta_megatron.chains import alltoall_allgather
from monta_megatron.chains.chain import Chain

ALLTOALL = Chain(
    name="alltoall",
    rows="permuted tokens",
    stages=alltoall_allgather.ALLTOALL_ALLGATHER.stages,
    bind_stages=alltoall_allgather.bind_stages,
    serial=True,
)
