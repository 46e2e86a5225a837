"""What a watched iteration and a change look like."""

from monta_megatron.planner.online.drift import Change, MeasuredIteration

WATCHED = MeasuredIteration(
    iteration=7,
    chain="hierarchical_alltoall",
    num_chunks=2,
    exchange_ms={
        "dispatch": 10.0,
        "combine": 11.0,
        "combine_backward": 12.0,
        "dispatch_backward": 13.5,
    },
    inter_gb=0.25,
    intra_gb=1.5,
    avg_overload_factor=1.25,
    max_overload_factor=1.5,
    imbalance=0.5,
    slowest_ranks=(2,),
    predicted_ms=31.0,
    over_predicted=1.5,
    link_ms={"inter": 30.0, "intra": 10.0},
    link_over_predicted={"inter": 2.0, "intra": 1.0},
    predicted_busy_ms={"inter": 15.0, "intra": 10.0, "memory": 4.0, "host": 2.0},
)
CHANGE = Change(
    resource="inter",
    factor=4.0,
    since=5,
    stages=("stage alltoall between nodes, group rail",),
    ranks=(1, 3),
    rate_ratio=0.25,
)
