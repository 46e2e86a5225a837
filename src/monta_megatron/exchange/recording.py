"""Recorded spans of a rank's resources, and the file of one rank's recording. No torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from monta_megatron.chains.program import Operation, ResourceOrCompute
from monta_megatron.common import strict_yaml
from monta_megatron.common.files import write_whole
from monta_megatron.common.rules import PositiveInt, Text, require

ResourceOrHost: TypeAlias = Literal[ResourceOrCompute, "host"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A piece of work on one resource.

    Attributes:
        pass_name: dispatch, combine, or the backward pass of one of them.
        stage: a stage of the chain, or what comes before or after it.
        chunk: None where it is done for all chunks at once.
        operation: its number in the program of the pass; None for what surrounds the program.
        resource: that it occupies.
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
        """Key of the operation that it is a step of."""
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


RankFormat: TypeAlias = Literal["monta training 1"]
RANK_FORMAT: RankFormat = get_args(RankFormat)[0]


@dataclass(frozen=True, kw_only=True)
class RecordedPass:
    """One run of a pass.

    Attributes:
        turn: how often the pass had run before in the iteration: the micro-batch, where nothing is
            evaluated or recomputed.
        spans: what ran in it, by the clock of the exchange's first rank.
    """

    turn: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        require(len(self.spans) > 0, "spans", "none", "be at least one")


@dataclass(frozen=True, kw_only=True)
class RankRecording:
    """One rank's exchange in one iteration of a training, in its first MoE layer.

    Attributes:
        format: format of the file.
        iteration: the iteration, counted from the start of the run.
        rank: this rank among all of the training.
        exchange: the ranks of its exchange.
        nodes: the node of each of them.
        chain: the chain that ran.
        num_chunks: its number of chunks.
        tp: tensor parallel size.
        ep: expert parallel size.
        etp: expert tensor parallel size.
        num_experts: experts of the layer.
        topk: experts of each token.
        hidden_size: hidden size of a row.
        tokens: tokens of this rank.
        dtype: of the rows.
        device: what ran it.
        inter_mbit: rate between nodes, where they are emulated; else None.
        clock: how the ranks' clocks were aligned.
        clock_error_us: how far apart two ranks' times may be for lack of a common clock.
        versions: of what ran.
        passes: everything that ran.
    """

    format: RankFormat = RANK_FORMAT
    iteration: PositiveInt
    rank: int
    exchange: tuple[int, ...]
    nodes: tuple[int, ...]
    chain: Text
    num_chunks: PositiveInt
    tp: PositiveInt
    ep: PositiveInt
    etp: PositiveInt
    num_experts: PositiveInt
    topk: PositiveInt
    hidden_size: PositiveInt
    tokens: int
    dtype: Text
    device: Text
    inter_mbit: float | None
    clock: Text
    clock_error_us: float
    versions: Mapping[str, str | None]
    passes: tuple[RecordedPass, ...]

    def save(self, folder: Path) -> None:
        """Write the rank's file in a folder, whole or not at all.

        Raises:
            ValueError: it cannot be written.
        """
        write_whole(folder / name_of(self.rank), json.dumps(strict_yaml.plain(self)) + "\n")


def name_of(rank: int) -> str:
    """The name of a rank's file; in the order of their names they are in that of their ranks."""
    return f"rank_{rank:05}.json"
