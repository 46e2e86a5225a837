"""`alltoall_allgather`: the MoNTA layout, for expert tensor parallelism across nodes.

    Permute (pack chunk c) | A2A(EP) | AG(ETP) | Permute (into expert order)

The AllToAll crosses nodes while the AllGather of the previous chunk runs inside them and the
copies of the chunk before that run alongside both (arXiv 2411.00662; here in forward and backward).
At ETP = 1 it is a chunked AllToAll. A row is a permuted token, so a token may cross the network
once for each of its experts.

Order of rows (etp rank t, source EP rank s, local expert l; r: the tokens of one (t, s, l)):

    source side       (s = this rank)   expert-major: Megatron's own permutation
    after A2A(EP)     (s, l, r)         of chunk c
    after AG(ETP)     (t, s, l, r)      of chunk c
    expert side       (l, t, s, r)      stock's order, all chunks

Hand-worked: EP 2, ETP 1, L = 2, two chunks; this rank holds rows [a a b b b b | c d d] for the
experts 0 1 | 2 3. Chunk 0 takes two thirds of each count, plus a third of a row for the second
expert of a rank, rounded down: 1 of a, 3 of b, 0 of c, 1 of d. Chunk 1 takes the rest. So A2A
sends [4, 1] rows, then [2, 2].
"""

import numpy as np

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
EXCHANGE = AllToAll(name="alltoall", group="ep")
GATHER = AllGather(name="allgather", group="etp")
ORDER = Permute(name="order")


def bind_stages(layout: Layout, counts: ChainCounts, num_chunks: int) -> tuple[BoundStage, ...]:
    """Rows per stage, chunk and peer; see `Chain.bind`."""
    assert isinstance(counts, Counts)
    num_local_experts = counts.sent.shape[-1]
    etp_rank = layout.rank % layout.etp

    # Step 1: split the rows of every source for every expert.
    sent_bounds = split(counts.sent, num_chunks)  # [C + 1, EP, L]
    received_bounds = split(counts.received, num_chunks)  # [C + 1, ETP, EP, L]
    sent = np.diff(sent_bounds, axis=0)  # [C, EP, L]
    received = np.diff(received_bounds, axis=0)  # [C, ETP, EP, L]

    # Step 2: on the source side, a chunk's rows are one run of every expert's rows.
    packed = None
    if num_chunks > 1:
        packed = Segments(
            lengths=sent.reshape(num_chunks, -1),
            find_starts=lambda: (starts_of(counts.sent) + sent_bounds[:-1]).reshape(num_chunks, -1),
        )

    # Step 3: the exchange and the gather.
    arrived = received[:, etp_rank].sum(axis=2)  # [C, EP]
    gathered = received.sum(axis=(2, 3))  # [C, ETP]

    # Step 4: expert order (l, t, s), each chunk's run after those of the earlier chunks.
    ordered = None
    if num_chunks > 1 or num_local_experts > 1:

        def find_starts() -> RowCounts:
            by_expert = starts_of(counts.received.transpose(2, 0, 1)).transpose(1, 2, 0)
            return (by_expert + received_bounds[:-1]).reshape(num_chunks, -1)

        ordered = Segments(lengths=received.reshape(num_chunks, -1), find_starts=find_starts)

    sent_total = sent.sum(axis=(1, 2))[:, None]
    gathered_total = gathered.sum(axis=1)[:, None]
    return (
        BoundStage(stage=PACK, send=sent_total, receive=sent_total, segments=packed),
        BoundStage(stage=EXCHANGE, send=sent.sum(axis=2), receive=arrived),
        bind_gather(GATHER, gathered, etp_rank),
        BoundStage(stage=ORDER, send=gathered_total, receive=gathered_total, segments=ordered),
    )


ALLTOALL_ALLGATHER = Chain(
    name="alltoall_allgather",
    rows="permuted tokens",
    stages=(PACK, EXCHANGE, GATHER, ORDER),
    bind_stages=bind_stages,
)
