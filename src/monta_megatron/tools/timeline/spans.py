"""What ran when: spans of time on the resources of a rank, and how a record becomes spans.

A track is one rank, or the one rank that the cost model prices for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from monta_megatron.chains.program import Operation, Resource
from monta_megatron.common.rules import Text
from monta_megatron.planner.chain_price import RESOURCE_NAMES

ResourceOrHost: TypeAlias = Literal[Resource, "host"]
# With their names in tables and pictures, in their order there.
RESOURCES_AND_HOST: Mapping[str, str] = {**RESOURCE_NAMES, "host": "host"}
# The resolution of the clocks; smaller differences are rounding.
RESOLUTION_US = 1e-3


def pipeline_name(chain: str, num_chunks: int) -> str:
    """The text for a chain with a number of chunks."""
    return f"{chain} in 1 chunk" if num_chunks == 1 else f"{chain} in {num_chunks} chunks"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A piece of work on one resource.

    Attributes:
        pass_name: dispatch, combine, or the backward pass of one of them.
        stage: a stage of the chain, or what comes before or after it.
        chunk: None where it is done for all chunks at once.
        operation: its number in the program of the pass; None for what surrounds the program.
        resource: what it occupies.
        action: "run" on a resource; "launch" of an operation by the host, or its "wait" for one.
        start_us: time since the start of the timeline's first span.
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
        """The same, by so much later."""
        return replace(self, start_us=self.start_us + by_us, end_us=self.end_us + by_us)


@dataclass(frozen=True, kw_only=True)
class Track:
    """The spans of one rank.

    Attributes:
        name: the name to show.
        spans: its spans, in no particular order.
    """

    name: Text
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What ran when, on all ranks.

    Attributes:
        source: where it comes from.
        name: what ran.
        tracks: one per rank, or one for all ranks if predicted.
    """

    source: Literal["recorded", "predicted"]
    name: Text
    tracks: tuple[Track, ...]


# The name of a pass, and an operation of its program.
Key: TypeAlias = tuple[str, int]


class TimedStep(NamedTuple):
    """A step of the executor (`exchange.monitor.Step`) with its times.

    Attributes:
        action: begin, start, wait, ready or end.
        pass_name, operation: what it is a step of.
        host_us: when the host reached it.
        device_us: when the device reached it; on CPU ranks the same.
    """

    action: str
    pass_name: str
    operation: Operation
    host_us: float
    device_us: float

    @property
    def key(self) -> Key:
        """What it is a step of."""
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
    """The spans of one rank from the steps that its executor noted.

    A copy runs from when its input is ready to its end, a collective from its start until it has
    finished, whenever it is waited for.

    Args:
        steps: the steps, in the order in which they were noted.
        ends_us: when each collective finished.
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


def rows_of(spans: Sequence[Span]) -> list[list[Span]]:
    """One resource's spans in as few rows as possible without overlap, the first filled first."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_us, span.end_us)):
        for row in rows:
            if row[-1].end_us <= span.start_us + RESOLUTION_US:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows
