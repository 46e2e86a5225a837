"""What it costs the host to start an operation, and to go through a pass."""

from dataclasses import dataclass

from monta_megatron.chains.program import COLLECTIVES
from monta_megatron.common.rules import NonNegativeFloat, Text
from monta_megatron.planner.curves import Kind, Operation

# Operations on the routing map and on expert ids, made of many short steps.
FINDS: tuple[Operation, ...] = ("find", "find_lists", "count", "lists")


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Host time to start an operation, for each stage and chunk, and for what surrounds the stages.

    Attributes:
        collective_us: to start an AllToAll or AllGather.
        operation_us: to hand one operation on tensors to the device, its launch included; what a
            stage takes of them is in `planner.host_operations`. Needed where one of `copy_us`,
            `sum_us` and `find_us` is not given.
        copy_us: to start a copy of rows, whatever its operations; none takes `operation_us` for
            each of them.
        sum_us: likewise, a sum over copies.
        find_us: likewise, to count, list expert ids, or find from them what is copied.
        counts_to_host_us: to copy the counts to the host and wait for them.
        counts_us: to count what goes where and bind a chain to it, once per dispatch.
        pass_us: what a pass takes besides its stages: autograd and the executor.
        stage_us: what the executor takes for each stage of each chunk.
        first_collective_us: how much longer the first chunk of a collective's stage takes than
            later ones, whose code is in the host's caches by then.
        first_copy_us: the same for an operation in memory.
        first_find_us: the same for what counts, lists and finds.
        kind: whether these were measured on this cluster.
        source: what they were measured with, or where they were published.
    """

    collective_us: NonNegativeFloat
    operation_us: NonNegativeFloat | None = None
    copy_us: NonNegativeFloat | None = None
    sum_us: NonNegativeFloat | None = None
    find_us: NonNegativeFloat | None = None
    counts_to_host_us: NonNegativeFloat
    counts_us: NonNegativeFloat = 0.0
    pass_us: NonNegativeFloat = 0.0
    stage_us: NonNegativeFloat = 0.0
    first_collective_us: NonNegativeFloat = 0.0
    first_copy_us: NonNegativeFloat = 0.0
    first_find_us: NonNegativeFloat = 0.0
    kind: Kind
    source: Text

    def __post_init__(self) -> None:
        if self.operation_us is None and None in (self.copy_us, self.sum_us, self.find_us):
            raise ValueError(
                "operation_us: missing, must be given, or copy_us, sum_us and find_us instead"
            )

    def start_us(self, operation: Operation, num_host_operations: float) -> float:
        """Host time to start one operation that consists of so many on tensors."""
        of_operations_us = (self.operation_us or 0.0) * num_host_operations
        if operation in COLLECTIVES:
            return self.collective_us + of_operations_us
        given_us = self.sum_us if operation == "sum" else self.copy_us
        if operation in FINDS:
            given_us = self.find_us
        return of_operations_us if given_us is None else given_us

    def first_us(self, operation: Operation) -> float:
        """How much longer the first chunk of a stage takes than later ones."""
        if operation in COLLECTIVES:
            return self.first_collective_us
        return self.first_find_us if operation in FINDS else self.first_copy_us
