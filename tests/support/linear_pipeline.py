"""Stages that follow each other, as operations of a program, without a chain."""

from typing import NamedTuple

from monta_megatron.chains.program import Operation, Resource


class Stage(NamedTuple):
    """What every chunk goes through, `depth` steps after the first stage; times by chunk."""

    resource: Resource
    times_us: tuple[float, ...] = ()
    launch_us: float = 0.0
    depth: int = 0

    def operation(self, number: int, position: int, chunk: int) -> Operation:
        """That of a chunk; each position has a stream and a group."""
        is_copy = self.resource == "memory"
        return Operation(
            number=number,
            kind="put" if is_copy else "alltoall",
            stage=self.resource,
            position=position,
            chunk=chunk,
            series=position,
            reads=(),
            writes=(),
            scratch=(),
            resource=self.resource,
            group=None if is_copy else f"group {position}",  # type: ignore[arg-type]
            stream=position,
            ranks_per_sum=0,
        )
