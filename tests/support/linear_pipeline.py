"""Stages that follow each other, as operations of a program, without a chain."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from monta_megatron.chains.program import Operation, Policy, waits_of
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
        scratch=(),
        resource=resource,
        group=None if resource == "memory" else f"group {stage}",  # type: ignore[arg-type]
        stream=stage,
        waits=(),
        after=(),
        launch_after=(),
        host="enqueues",
        ranks_per_sum=0,
    )


def with_waits(
    operations: Sequence[Operation], needs: Sequence[Collection[int]], policy: Policy
) -> list[Operation]:
    """The operations with what they wait for."""
    waits = waits_of(operations, needs, policy)
    return [
        operation._replace(**of._asdict()) for operation, of in zip(operations, waits, strict=True)
    ]
