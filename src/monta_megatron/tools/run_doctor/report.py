"""What `monta doctor --run` prints: the exchange, what holds it back, what is not known."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from monta_megatron.common.text import shown
from monta_megatron.common.units import counted, time_text
from monta_megatron.tools.run_doctor.figures import ExchangeFigures, Finding, RunFigures
from monta_megatron.tools.run_doctor.rules import RULES

INDENT = "   "


def document(run: RunFigures, findings: Sequence[Finding]) -> dict[str, Any]:
    """The JSON document: what was found, by which rules, in which figures."""
    rules = [
        {"rule": rule.judge.__name__, "least": rule.least, "of": rule.of, "reason": rule.reason}
        for rule in RULES
    ]
    found = [asdict(finding) for finding in findings]
    return {"findings": found, **asdict(run), "rules": rules}


def text(run: RunFigures, findings: Sequence[Finding], width: int) -> str:
    """The same in words, in lines of at most so many characters."""
    return "\n".join(_lines(run, findings, width))


def _lines(run: RunFigures, findings: Sequence[Finding], width: int) -> Iterator[str]:
    def wrapped(words: str, first: str = INDENT, others: str = INDENT) -> list[str]:
        return textwrap.wrap(
            shown(words),
            width,
            initial_indent=first,
            subsequent_indent=others,
            break_on_hyphens=False,
            break_long_words=False,
        )

    if run.exchange is not None:
        yield from wrapped(_head(run, run.exchange), "", "")
        yield from wrapped(f"({run.exchange.basis})", "", "")
        yield ""
    for number, finding in enumerate(findings, 1):
        yield from wrapped(f"{finding.name}{_held(finding, run.exchange)}", f"{number}. ")
        yield from wrapped(finding.says)
        if run.exchange is None or finding.rests_on != run.exchange.basis:
            yield from wrapped(f"({finding.rests_on})")
        for advice in finding.advice:
            yield from wrapped(advice, f"{INDENT}try: ", f"{INDENT}     ")
        yield ""
    if not findings:
        yield from wrapped("nothing that is known holds it back", "", "")
        yield ""
    for note in run.notes:
        yield from wrapped(f"note: {note}", "", "")


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
