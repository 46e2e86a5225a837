"""What it costs the host to start an operation, and to go through a pass."""

from dataclasses import dataclass, fields, replace
from functools import cached_property

from monta_megatron.chains.program import COLLECTIVES
from monta_megatron.common.rules import NonNegativeFloat, PositiveFloat, Text, require
from monta_megatron.planner.curves import Kind, Operation

# Operations on the routing map and on expert ids, made of many short steps.
FINDS: tuple[Operation, ...] = ("find", "find_lists", "count", "lists")


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Host time to start an operation, for each stage and chunk, and for what surrounds the stages.

    Attributes:
        collective_us: to start an AllToAll or AllGather, whatever its group.
        collective_peer_us: as much more for each other rank of the group.
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
        host_speed: how many times as fast as the processor of these figures the cluster's is: all
            of them are divided by it.
        conservative_speed: the least that it may be; none for the same.
        optimistic_speed: the most that it may be; none for the same.
        kind: whether these were measured on this cluster.
        source: what they were measured with, or where they were published.
    """

    collective_us: NonNegativeFloat
    collective_peer_us: NonNegativeFloat = 0.0
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
    host_speed: PositiveFloat = 1.0
    conservative_speed: PositiveFloat | None = None
    optimistic_speed: PositiveFloat | None = None
    kind: Kind
    source: Text

    def __post_init__(self) -> None:
        if self.operation_us is None and None in (self.copy_us, self.sum_us, self.find_us):
            raise ValueError(
                "operation_us: missing, must be given, or copy_us, sum_us and find_us instead"
            )
        for name, is_end, rule in (
            ("conservative_speed", lambda speed: speed <= self.host_speed, "at most"),
            ("optimistic_speed", lambda speed: speed >= self.host_speed, "at least"),
        ):
            speed = getattr(self, name)
            if speed is not None:
                require(is_end(speed), name, speed, f"be {rule} host_speed, {self.host_speed:g}")

    @cached_property
    def at_speed(self) -> "HostCosts":
        """The same costs as this host has them: of speed 1."""
        if self.host_speed == 1:
            return self
        scaled = {
            entry.name: value / self.host_speed
            for entry in fields(self)
            if entry.name.endswith("_us") and (value := getattr(self, entry.name)) is not None
        }
        costs = replace(self, conservative_speed=None, optimistic_speed=None, host_speed=1.0)
        return replace(costs, **scaled)

    def start_us(
        self, operation: Operation, num_host_operations: float, num_peers: int = 0
    ) -> float:
        """Host time to start one operation.

        Args:
            operation: what is started.
            num_host_operations: operations on tensors that it consists of.
            num_peers: other ranks of a collective's group.
        """
        of_operations_us = (self.operation_us or 0.0) * num_host_operations
        if operation in COLLECTIVES:
            return self.collective_us + self.collective_peer_us * num_peers + of_operations_us
        given_us = self.sum_us if operation == "sum" else self.copy_us
        if operation in FINDS:
            given_us = self.find_us
        return of_operations_us if given_us is None else given_us

    def first_us(self, operation: Operation) -> float:
        """How much longer the first chunk of a stage takes than later ones."""
        if operation in COLLECTIVES:
            return self.first_collective_us
        return self.first_find_us if operation in FINDS else self.first_copy_us
