"""Stages that follow each other, as operations of a program, without a chain."""

from collections.abc import Sequence
from typing import NamedTuple

from monta_megatron.chains.program import Operation, Resource
from monta_megatron.planner.price import Work


class Stage(NamedTuple):
    """What every chunk goes through, `depth` steps after the first stage."""

    work: Work
    depth: int


def work_of(
    stage: str, resource: Resource, times_us: tuple[float, ...], launch_us: float = 0.0
) -> Work:
    """A stage of a pass in which nothing moves."""
    return Work(
        pass_name="dispatch",
        stage=stage,
        resource=resource,
        times_us=times_us,
        launch_us=launch_us,
    )


def operation_of(number: int, stage: int, chunk: int, stages: Sequence[Stage]) -> Operation:
    resource = stages[stage].work.resource
    assert resource != "host", "an operation is on the device"
    return Operation(
        number=number,
        kind="put" if resource == "memory" else "alltoall",
        stage=stages[stage].work.stage,
        position=stage,
        chunk=chunk,
        series=stage,
        reads=(),
        writes=(),
        scratch=(),
        resource=resource,
        group=None if resource == "memory" else f"group {stage}",  # type: ignore[arg-type]
        stream=stage,
        ranks_per_sum=0,
    )
