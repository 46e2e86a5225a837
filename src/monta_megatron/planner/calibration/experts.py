"""Which calls of a layer's experts are timed, and what becomes of the times. No torch."""

from collections.abc import Mapping, Sequence
from typing import get_args

from monta_megatron.chains.calibration_tasks import ExpertCall, Point
from monta_megatron.planner.expert_curve import ExpertCurve
from monta_megatron.planner.experts import ExpertSizes

# Rows of each expert, in steps of 4x: few on CPU ranks, where they take long.
NUM_SIZES = {"cpu": 4, "cuda": 7}
# A curve may hold no time of 0.
LEAST_US = 0.1


def expert_points(sizes: ExpertSizes, device_type: str) -> list[Point]:
    """The calls of a rank's experts that are timed, each for several numbers of rows."""
    return [
        Point(
            operation=call,
            resource="compute",
            group_size=1,
            ranks_on_node=1,
            num_rows=sizes.num_local_experts * 4**step,
            num_bytes=sizes.num_local_experts * 4**step * sizes.hidden_size * sizes.value_bytes,
        )
        for call in get_args(ExpertCall)
        for step in range(NUM_SIZES[device_type])
    ]


def expert_curve(
    sizes: ExpertSizes,
    points: Sequence[Point],
    times_us: Mapping[str, float],
    launches_us: Mapping[str, float] | None,
    source: str,
) -> ExpertCurve:
    """What experts take, from times of calls forward, and forward and backward.

    Args:
        sizes: the experts of a rank.
        points: that were timed, ascending.
        times_us: of each, by its name.
        launches_us: until the host was free again; None where it computes itself.
        source: what it was measured with.
    """
    forward, both = (
        [point for point in points if point.operation == call] for call in get_args(ExpertCall)
    )
    launch_us = 0.0
    if launches_us is not None:
        launch_us = min(launches_us[point.name] for point in forward)
    forward_us, both_us = ([times_us[point.name] for point in of] for of in (forward, both))
    return ExpertCurve(
        **vars(sizes),
        rows_per_expert=tuple(point.num_rows // sizes.num_local_experts for point in forward),
        forward_us=tuple(max(round(us - launch_us, 1), LEAST_US) for us in forward_us),
        backward_us=tuple(
            max(round(with_backward - us - launch_us, 1), LEAST_US)
            for us, with_backward in zip(forward_us, both_us, strict=True)
        ),
        launch_us=round(launch_us, 1),
        kind="measured",
        source=source,
    )
