"""The rules: each a cause, and from where on it is one; and what they find, in order.

What a finding holds is an upper bound: what else runs meanwhile takes its place. So findings do not
add up, and the first one is where to begin.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from monta_megatron.planner.online.drift import BAND, WAITED_FOR
from monta_megatron.planner.select import MARGIN
from monta_megatron.tools.run_doctor.bound import copies, host, link, slower_link
from monta_megatron.tools.run_doctor.experts import experts
from monta_megatron.tools.run_doctor.figures import Finding, RunFigures
from monta_megatron.tools.run_doctor.imbalance import OVERLOADED, overload, waiting
from monta_megatron.tools.run_doctor.memory import memory

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
    """What holds a run back: what may have ended it first, then by the time that it holds."""
    findings = [finding for rule in RULES for finding in rule.judge(run, rule.least)]
    least_ms = 0.0
    if run.iteration_ms is not None and run.exchange is not None and run.exchange.of_iteration:
        least_ms = LEAST_OF_ITERATION * run.iteration_ms
    held_ms = [math.inf if each.held_ms is None else each.held_ms for each in findings]
    order = sorted(range(len(findings)), key=lambda number: -held_ms[number])
    # What holds nothing is worth knowing, or was asked for.
    return [findings[number] for number in order if not 0 < held_ms[number] < least_ms]
