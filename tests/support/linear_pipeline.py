"""Stages that follow each other, as operations of a program, without a chain."""

from collections.abc import Sequence
from typing import NamedTuple

from monta_megatron.chains.program import Operation
from monta_megatron.planner.schedule import Work


class Stage(NamedTuple):
    """What every chunk goes through, `depth` steps after the first stage."""

    work: Work
    depth: int


def operation_of(number: int, stage: int, chunk: int, stages: Sequence[Stage]) -> Operation:
    resource = stages[stage].work.resource
    return Operation(
        number=number,
        kind="put" if resource == "memory" else "alltoall",
        stage=stages[stage].work.stage,
        position=stage,
        chunk=chunk,
        series=stage,
        reads=(),
        writes=(),
        resource=resource,
        group=None if resource == "memory" else f"group {stage}",  # type: ignore[arg-type]
        stream=stage,
        waits=(),
        after=(),
        launch_after=(),
        host="enqueues",
        parts_per_sum=0,
    )
