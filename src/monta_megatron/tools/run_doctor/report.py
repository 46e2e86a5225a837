"""Report of `monta doctor --run`: the iteration by part, the exchange, and the causes in order.

The gain of a finding is an upper bound, since other work takes the place of what is saved. So gains
do not add up, and the first finding is where to begin.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from monta_megatron.common.tables import WIDTH
from monta_megatron.common.units import counted, time_text
from monta_megatron.planner.online.drift import BAND, WAITED_FOR
from monta_megatron.planner.select import MARGIN
from monta_megatron.tools.run_doctor.causes import (
    OVERLOADED,
    copies,
    experts,
    host,
    link,
    memory,
    overload,
    slower_link,
    waiting,
)
from monta_megatron.tools.run_doctor.figures import ExchangeFigures, Finding, RunFigures, wrapped
from monta_megatron.tools.run_doctor.iteration import IterationReport, explain
from monta_megatron.tools.run_doctor.reading import read_log_of_run, read_run_folder

# Iterations differ by so much among themselves: what holds less of one is none of its troubles.
LEAST_OF_ITERATION = 0.02
MOST = "below it all else together takes longer"


class Rule(NamedTuple):
    """A cause, and from where on it is one.

    Attributes:
        judge: figures and the threshold -> what was found.
        least: the threshold.
        of: of what.
        reason: why that.
    """

    judge: Callable[[RunFigures, float], Iterator[Finding]]
    least: float
    of: str
    reason: str


RULES = (
    Rule(memory, 0.9, "a rank's memory", "buffers of NCCL and gaps of the allocator take the rest"),
    Rule(slower_link, BAND, "predicted time", "shared cores change their speed by up to 1.6"),
    Rule(link, 0.5, "the exchange", MOST),
    Rule(host, 0.5, "the exchange", MOST),
    Rule(copies, 0.5, "the exchange", MOST),
    Rule(overload, OVERLOADED, "a balanced rank's rows", "it then holds a sixth of the exchange"),
    Rule(waiting, WAITED_FOR, "the exchange", "the log names slowest ranks from there on"),
    Rule(experts, MARGIN, "a layer", "the margin within which auto prefers what is plainer"),
)


def diagnose(run: RunFigures) -> list[Finding]:
    """Causes that hold a run back: first what may have ended it, then by their time."""
    findings = [finding for rule in RULES for finding in rule.judge(run, rule.least)]
    least_ms = 0.0
    if run.iteration_ms is not None and run.exchange is not None and run.exchange.of_iteration:
        least_ms = LEAST_OF_ITERATION * run.iteration_ms
    held_ms = [math.inf if each.held_ms is None else each.held_ms for each in findings]
    order = sorted(range(len(findings)), key=lambda number: -held_ms[number])
    # A finding that holds nothing is worth knowing, or was asked for.
    return [findings[number] for number in order if not 0 < held_ms[number] < least_ms]


INDENT = "   "


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Report of a run's folder.

    Attributes:
        run: figures of its exchange.
        iteration: by part, as its log has it; None where that cannot be predicted, and a note of
            `run` says why.
    """

    run: RunFigures
    iteration: IterationReport | None

    def document(self) -> dict[str, Any]:
        """The JSON document: findings, their rules and figures."""
        rules = [
            {"rule": rule.judge.__name__, "least": rule.least, "of": rule.of, "reason": rule.reason}
            for rule in RULES
        ]
        found = [asdict(finding) for finding in diagnose(self.run)]
        by_part = None if self.iteration is None else self.iteration.document()
        return {"findings": found, **asdict(self.run), "rules": rules, "iteration": by_part}

    def text(self, width: int = WIDTH) -> str:
        """The same in words, in lines of at most so many characters."""
        by_part = [] if self.iteration is None else [self.iteration.text(width), ""]
        return "\n".join([*by_part, *_lines(self.run, diagnose(self.run), width)])


def examine_run(folder: Path) -> RunReport:
    """Read a run's folder, see `reading.read_run_folder`, and explain its iteration.

    Raises:
        ValueError: one line: it holds nothing to read, or a file is malformed.
    """
    run = read_run_folder(folder)
    try:
        record, cluster = read_log_of_run(folder)
        measured_ms = None
        if run.exchange is not None and run.exchange.kind == "measured":
            measured_ms = run.exchange.exchange_ms
        return RunReport(run=run, iteration=explain(record, cluster, measured_ms))
    except ValueError as error:
        reason = str(error).removeprefix("--log: ").removeprefix("--cluster: ")
        note = f"the iteration by part is not predicted: {reason}"
        return RunReport(run=replace(run, notes=(*run.notes, note)), iteration=None)


def _lines(run: RunFigures, findings: Sequence[Finding], width: int) -> Iterator[str]:
    indented = partial(wrapped, width=width, first=INDENT)

    if run.exchange is not None:
        yield from wrapped(_head(run, run.exchange), width)
        yield from wrapped(f"({run.exchange.basis})", width)
        yield ""
    for number, finding in enumerate(findings, 1):
        yield from wrapped(f"{finding.name}{_held(finding, run.exchange)}", width, f"{number}. ")
        yield from indented(finding.says)
        if run.exchange is None or finding.rests_on != run.exchange.basis:
            yield from indented(f"({finding.rests_on})")
        for advice in finding.advice:
            yield from wrapped(advice, width, f"{INDENT}try: ")
        yield ""
    if not findings:
        yield from wrapped("nothing that is known holds it back", width)
        yield ""
    for note in run.notes:
        yield from wrapped(f"note: {note}", width)


def _head(run: RunFigures, of: ExchangeFigures) -> str:
    per = "an iteration" if of.of_iteration else "a layer and micro-batch"
    head = (
        f"exchange: {of.chain} in {counted(of.num_chunks, 'chunk')}, {_time(of.exchange_ms)} of "
        f"{per}, {of.kind}"
    )
    if of.kind == "measured":
        head += f", {of.exchange_ms / of.predicted_ms:.2f}x the predicted {_time(of.predicted_ms)}"
    if run.iteration_ms is not None:
        head += f"; {_time(run.iteration_ms)} a whole iteration, measured"
        if of.of_iteration and run.iteration_ms > 0:
            head += f" ({of.exchange_ms / run.iteration_ms:.0%})"
    return head


def _held(finding: Finding, of: ExchangeFigures | None) -> str:
    if not finding.held_ms:
        return ""
    part = ""
    if of is not None and of.exchange_ms > 0:
        part = f", {finding.held_ms / of.exchange_ms:.0%} of the exchange"
    return f": at most {_time(finding.held_ms)}{part}, {finding.kind}"


def _time(ms: float) -> str:
    return time_text(1e3 * ms)
