"""Results of a tuning: a table for the log, a plan for later trainings, its saved state."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monta_megatron.chains import CHAINS
from monta_megatron.common import strict_yaml
from monta_megatron.common.rules import PositiveInt, require
from monta_megatron.common.tables import table
from monta_megatron.common.units import counted
from monta_megatron.planner.online.tuning import Key, Tuning, TuningCandidate, TuningStep
from monta_megatron.planner.plan import Plan, plan_of
from monta_megatron.planner.select import MARGIN, Selection


def tuning_table(tuning: Tuning) -> list[str]:
    """Predicted and measured times of the candidates, the fastest first, as lines for the log.

    Where computation overlaps the exchange, a column has the exposed part of the measured times,
    and the least exposed comes first. Imbalance is by how much the passes of an iteration take
    longer on the slowest rank than on the fastest, which waits least for the others.
    """
    measured_us, times_us, exposed_us = tuning.measured_us, tuning.times_us, tuning.exposed_us
    pick = "the planner's pick"
    said = {0: pick, tuning.winner: "chosen" if tuning.winner else f"chosen, {pick}"}
    rows, is_overlapped = [], tuning.is_overlapped
    for number, candidate in enumerate(tuning.candidates):
        us = measured_us[number]
        if us is None:
            continue
        steps = [step for step in tuning.steps if step.candidate == number and step.counts]
        slowest_us, fastest_us = (
            sum(getattr(step, name) for step in steps) for name in ("slowest_us", "us")
        )
        exposed = exposed_us[number] or 0.0
        rows.append(
            (
                exposed,
                [
                    candidate.chain,
                    candidate.num_chunks,
                    f"{candidate.predicted_us:,.0f}",
                    f"{us:,.0f}",
                    f"{us / candidate.predicted_us - 1:+.0%}",
                    *([f"{exposed:,.0f}"] if is_overlapped else []),
                    len(times_us[number]),
                    f"{slowest_us / fastest_us - 1:.0%}" if fastest_us else None,
                    said.get(number, ""),
                ],
            )
        )
    head = ["chain", ">chunks", ">predicted us", ">measured us", ""]
    return table(
        [*head, *([">exposed us"] if is_overlapped else []), ">runs", ">imbalance", ""],
        [cells for _, cells in sorted(rows, key=lambda row: row[0])],
        title=f"tuned over {counted(tuning.num_steps, 'iteration')}: dispatch + combine, forward + "
        f"backward{_beside(tuning)}",
    ).splitlines()


def plan_of_tuning(selection: Selection, tuning: Tuning, tokens_per_rank: int) -> Plan:
    """Plan of a tuning's choice, for later trainings.

    Args:
        selection: that can run, priced for the traffic of the tuning; it holds the winner.
        tuning: which is over.
        tokens_per_rank: the most tokens of any rank, for which the plan is made.
    """
    winner = tuning.candidates[tuning.winner]
    price = next(
        price for price in selection.prices if (price.chain.name, price.num_chunks) == winner.key
    )
    plan = plan_of(replace(selection, price=price))
    said = _why_rejected(tuning)
    return replace(
        plan,
        reason=_reason(tuning),
        key=replace(plan.key, tokens_per_rank=tokens_per_rank),
        candidates=tuple(
            candidate
            if candidate.rejected is None or candidate.num_chunks is None
            else replace(
                candidate,
                rejected=said.get((candidate.chain, candidate.num_chunks), candidate.rejected),
            )
            for candidate in plan.candidates
        ),
    )


def plan_path(path: str, stage: int, num_stages: int) -> Path:
    """File of a pipeline stage's plan: plan.yaml, or plan.1.yaml if there are several."""
    whole = Path(path)
    return whole if num_stages == 1 else whole.with_suffix(f".{stage}{whole.suffix}")


def _reason(tuning: Tuning) -> str:
    """Reason of the choice: measured and predicted times."""
    winner, measured_us = tuning.candidates[tuning.winner], tuning.measured_us
    us = measured_us[tuning.winner]
    over = f"measured over {counted(tuning.num_steps, 'iteration')}"
    if us is None:
        return f"{over}: not often enough to know better; predicted {winner.predicted_us:,.0f} us"
    exposed_us = tuning.exposed_us
    others = [
        number
        for number, other_us in enumerate(measured_us)
        if other_us is not None and number != tuning.winner
    ]
    took = _took(tuning, tuning.winner)
    if others:
        next_ = min(others, key=lambda number: exposed_us[number] or 0.0)
        name = tuning.candidates[next_].name
        took += (
            f", within the margin of {MARGIN:.0%} of {name} ({_took(tuning, next_)})"
            if (exposed_us[next_] or 0.0) < (exposed_us[tuning.winner] or 0.0)
            else f"; {name}, the next, {_took(tuning, next_)}"
            if tuning.is_overlapped
            else f", {(measured_us[next_] or 0.0) / us:.2f}x as fast as {name}, the next"
        )
    return f"{over}{_beside(tuning)}: {took}; predicted {winner.predicted_us:,.0f} us"


def _beside(tuning: Tuning) -> str:
    """Note on computation that overlaps the exchange; "" for none."""
    overlapped = tuning.candidates[0].overlapped_compute
    stated_us = 0.0 if overlapped is None else overlapped.overlapped_compute_us
    us = tuning.hidden_us if tuning.measures_exposed else stated_us
    return f" beside {us:,.0f} us of computation" if tuning.is_overlapped else ""


def _took(tuning: Tuning, number: int) -> str:
    """3,000 us; where computation overlaps them "3,000 us, 500 us of them exposed"."""
    us, exposed_us = tuning.measured_us[number], tuning.exposed_us[number]
    exposed = f", {exposed_us:,.0f} us of them exposed" if tuning.is_overlapped else ""
    return f"{us:,.0f} us{exposed}"


def _why_rejected(tuning: Tuning) -> dict[Key, str]:
    """Reason of the tuning against each measured candidate."""
    winner_us = tuning.measured_us[tuning.winner]
    said = {}
    for number, (candidate, us) in enumerate(
        zip(tuning.candidates, tuning.measured_us, strict=True)
    ):
        if us is not None:
            change = ""
            if winner_us is not None and not tuning.is_overlapped:
                change = f", {us / winner_us - 1:+.0%}"
            said[candidate.key] = f"measured {_took(tuning, number)}{change}"
    return said


@dataclass(frozen=True, kw_only=True)
class TuningState:
    """Values of `Tuning.state`, by the names of its fields."""

    num_steps: PositiveInt
    candidates: tuple[TuningCandidate, ...]
    steps: tuple[TuningStep, ...]
    settled_us: tuple[int, ...] | None
    settled_exposed_us: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        num_candidates = len(self.candidates)
        names = [candidate.name for candidate in self.candidates]
        require(0 < len(set(names)) == num_candidates, "candidates", names, "be different ones")
        require(len(self.steps) <= self.num_steps, "steps", len(self.steps), "be at most num_steps")
        for step in self.steps:
            known = 0 <= step.candidate < num_candidates
            require(known, "steps.candidate", step.candidate, f"be from 0 to {num_candidates - 1}")
            require(0 <= step.us <= step.slowest_us, "steps.us", step.us, "be 0 to slowest_us")
        for name in ("settled_us", "settled_exposed_us"):
            settled = getattr(self, name)
            fits = settled is None or (len(settled) == num_candidates and min(settled) >= 0)
            require(fits, name, settled, f"be {num_candidates} integers >= 0")


def resumed(state: Any, num_steps: int, chains: Collection[str] = tuple(CHAINS)) -> Tuning:
    """A tuning that goes on from a state; steps that were started and not added run again.

    Args:
        state: of `Tuning.state`, maybe from a file.
        num_steps: of the tuning here.
        chains: that can run here.

    Raises:
        ValueError: it does not fit; names the key, the value and the rule.
    """
    read = strict_yaml.build(TuningState, state, "tuning")
    asked = f"be {num_steps}, the steps that are asked for"
    require(read.num_steps == num_steps, "tuning: num_steps", read.num_steps, asked)
    for candidate in read.candidates:
        known = f"be one of {', '.join(chains)}, which can run here"
        require(candidate.chain in chains, "tuning: chain", repr(candidate.chain), known)
    return Tuning(
        candidates=read.candidates,
        num_steps=read.num_steps,
        steps=list(read.steps),
        settled_us=read.settled_us,
        settled_exposed_us=read.settled_exposed_us,
    )
