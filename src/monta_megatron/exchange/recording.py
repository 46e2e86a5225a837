"""Recorded spans of a rank's resources. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from monta_megatron.chains.program import Operation, Resource
from monta_megatron.common.rules import Text

ResourceOrHost: TypeAlias = Literal[Resource, "host"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """An interval of one resource.

    Attributes:
        pass_name: dispatch, combine, or the backward pass of one of them.
        stage: a stage of the chain, or work before or after it.
        chunk: None for all chunks at once.
        operation: its number in the program of the pass; None outside of the program.
        resource: the resource occupied.
        action: "run" on a resource; "launch" or "wait" of the host for an operation.
        start_us: since the start of the timeline's first span.
        end_us: likewise.
    """

    pass_name: Text
    stage: Text
    chunk: int | None
    resource: ResourceOrHost
    action: Literal["run", "launch", "wait"]
    start_us: float
    end_us: float
    operation: int | None = None

    def shifted(self, by_us: float) -> "Span":
        """The same span, `by_us` later."""
        return replace(self, start_us=self.start_us + by_us, end_us=self.end_us + by_us)


# The name of a pass, and an operation of its program.
Key: TypeAlias = tuple[str, int]


class TimedStep(NamedTuple):
    """A step of the executor (`exchange.monitor.Step`) with its times.

    Attributes:
        action: begin, start, wait, ready or end.
        pass_name, operation: its pass and operation.
        host_us: time on the host.
        device_us: time on the device; equal to `host_us` on CPU ranks.
    """

    action: str
    pass_name: str
    operation: Operation
    host_us: float
    device_us: float

    @property
    def key(self) -> Key:
        """Key of its operation."""
        return self.pass_name, self.operation.number

    def span(
        self,
        resource: ResourceOrHost,
        action: Literal["run", "launch", "wait"],
        start_us: float,
        end_us: float,
    ) -> Span:
        """A span of its operation."""
        return Span(
            pass_name=self.pass_name,
            stage=self.operation.stage,
            chunk=self.operation.chunk,
            resource=resource,
            action=action,
            start_us=start_us,
            end_us=end_us,
            operation=self.operation.number,
        )


def spans_of(steps: Sequence[TimedStep], ends_us: Mapping[Key, float]) -> list[Span]:
    """Spans of one rank from the recorded steps of its executor.

    A copy runs from when its input is ready to its end, a collective from its start until it
    finishes, independent of the wait for it.

    Args:
        steps: in the order of recording.
        ends_us: end of each collective.
    """
    spans: list[Span] = []
    launch_us = input_us = wait_us = 0.0
    for step in steps:
        operation = step.operation
        if step.action == "begin":
            launch_us, input_us = step.host_us, step.device_us
        elif step.action == "wait":
            wait_us = step.host_us
        elif step.action == "ready":
            input_us = step.device_us
            if operation.host != "enqueues":
                spans.append(step.span("host", "wait", wait_us, step.host_us))
        elif step.action == "start":
            end_us = ends_us[step.key]
            spans.append(step.span(operation.resource, "run", step.device_us, end_us))
            if operation.host == "starts":
                launch_us = step.host_us
        else:
            if not operation.is_collective:
                spans.append(step.span("memory", "run", input_us, step.device_us))
            if operation.host != "runs":
                spans.append(step.span("host", "launch", launch_us, step.host_us))
    return spans
