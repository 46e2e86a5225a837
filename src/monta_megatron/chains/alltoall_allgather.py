"""`alltoall_allgather`: the MoNTA layout, for expert tensor parallelism across nodes.

    Permute (pack chunk c) | A2A(EP) | AG(ETP) | Permute (into expert order)

The AllToAll crosses nodes while the AllGather of the previous chunk runs inside them and the
copies of the chunk before that run alongside both (arXiv 2411.00662; here in forward and backward).
At ETP = 1 it is a chunked AllToAll. A row is a permuted token, so a token may cross the network
once for each of its experts.

Order of rows (ETP rank g, source EP rank d, local expert l; r: the tokens of one (g, d, l)):

    source side       (d = this rank)   expert-major: Megatron's own permutation
    after A2A(EP)     (d, l, r)         of chunk c
    after AG(ETP)     (g, d, l, r)      of chunk c
    expert side       (l, g, d, r)      stock's order, all chunks

Hand-worked: EP 2, ETP 1, L = 2, two chunks; this rank holds rows [a a b b b b | c d d] for the
experts 0 1 | 2 3. Chunk 0 takes two thirds of each count, rounded to the nearest row for the first
expert of a rank and up for the second: 1 of a, 3 of b, 1 of c, 2 of d. Chunk 1 takes the rest. So
A2A sends [4, 3] rows, then [2, 0].
"""

from monta_megatron.chains.chain import Chain, ChainCounts, Counts, split, starts_of
from monta_megatron.chains.stages import (
    AllGather,
    AllToAll,
    BoundStage,
    Permute,
    RowCounts,
    Segments,
    bind_gather,
)
from monta_megatron.core import Layout

PACK = Permute(name="pack")
EP_ALLTOALL = AllToAll(name="alltoall", group="ep")
GATHER = AllGather(name="allgather", group="etp")
ORDER = Permute(name="order")


def bind_stages(layout: Layout, counts: ChainCounts, num_chunks: int) -> tuple[BoundStage, ...]:
    """Rows per stage, chunk and peer; see `Chain.bind`."""
    assert isinstance(counts, Counts)
    num_local_experts = counts.sent.shape[-1]
    etp_rank = layout.rank % layout.etp

    # Step 1: split the rows of every source for every expert; bounds of chunks are [C + 1, ...].
    sent_bounds, received_bounds = (
        split(rows, num_chunks) for rows in (counts.sent, counts.received)
    )
    sent_CDL, received_CGDL = (of[1:] - of[:-1] for of in (sent_bounds, received_bounds))

    # Step 2: scatter map of the source side: one run of every expert's rows.
    def source_runs() -> tuple[RowCounts, RowCounts]:
        starts_CDL = starts_of(counts.sent) + sent_bounds[:-1]
        return sent_CDL.reshape(num_chunks, -1), starts_CDL.reshape(num_chunks, -1)

    packed = None
    if num_chunks > 1:
        packed = Segments(num_runs=counts.sent.size, find_runs=source_runs)

    # Step 3: scatter map of the expert side: runs (l, g, d), each after those of earlier chunks.
    def expert_runs() -> tuple[RowCounts, RowCounts]:
        # [G, D, L] -> [L, G, D], laid end to end, and back
        starts_GDL = starts_of(counts.received.transpose(2, 0, 1)).transpose(1, 2, 0)
        starts_CGDL = starts_GDL + received_bounds[:-1]
        return received_CGDL.reshape(num_chunks, -1), starts_CGDL.reshape(num_chunks, -1)

    ordered = None
    if num_chunks > 1 or num_local_experts > 1:
        ordered = Segments(num_runs=counts.received.size, find_runs=expert_runs)

    # Step 4: rows of each stage.
    arrived_CD = received_CGDL[:, etp_rank].sum(axis=2)
    gathered_CG = received_CGDL.sum(axis=(2, 3))
    sent_CD = sent_CDL.sum(axis=2)
    source_rows_C1 = sent_CD.sum(axis=1, keepdims=True)
    expert_rows_C1 = gathered_CG.sum(axis=1, keepdims=True)
    return (
        BoundStage(stage=PACK, send=source_rows_C1, receive=source_rows_C1, segments=packed),
        BoundStage(stage=EP_ALLTOALL, send=sent_CD, receive=arrived_CD),
        bind_gather(GATHER, gathered_CG, etp_rank),
        BoundStage(stage=ORDER, send=expert_rows_C1, receive=expert_rows_C1, segments=ordered),
    )


ALLTOALL_ALLGATHER = Chain(
    name="alltoall_allgather",
    rows="permuted tokens",
    stages=(PACK, EP_ALLTOALL, GATHER, ORDER),
    bind_stages=bind_stages,
)
