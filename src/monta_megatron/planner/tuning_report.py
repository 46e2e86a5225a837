"""What a tuning found: a table for the log, and a plan for the trainings that follow."""

from dataclasses import replace
from pathlib import Path

from monta_megatron.common.quantities import counted
from monta_megatron.common.tables import plain_table
from monta_megatron.planner.plan import Candidate, Plan
from monta_megatron.planner.search import plan_of
from monta_megatron.planner.selection import MARGIN, Selection
from monta_megatron.planner.tuning import Tuning


def tuning_table(tuning: Tuning) -> list[str]:
    """Predicted and measured times of what was tried, the fastest first, as lines for the log.

    Imbalance is by how much the passes of an iteration take longer on the slowest rank than on the
    fastest, which waits least for the others.
    """
    measured_us, times_us = tuning.measured_us, tuning.times_us
    pick = "the planner's pick"
    said = {0: pick, tuning.winner: "chosen" if tuning.winner else f"chosen, {pick}"}
    rows = []
    for number, candidate in enumerate(tuning.candidates):
        us = measured_us[number]
        if us is None:
            continue
        steps = [step for step in tuning.steps if step.candidate == number and step.counts]
        slowest_us, fastest_us = (
            sum(getattr(step, name) for step in steps) for name in ("slowest_us", "us")
        )
        rows.append(
            (
                us,
                [
                    candidate.chain,
                    candidate.num_chunks,
                    f"{candidate.predicted_us:,.0f}",
                    f"{us:,.0f}",
                    f"{us / candidate.predicted_us - 1:+.0%}",
                    len(times_us[number]),
                    f"{slowest_us / fastest_us - 1:.0%}" if fastest_us else None,
                    said.get(number, ""),
                ],
            )
        )
    head = ["chain", ">chunks", ">predicted us", ">measured us", "", ">runs", ">imbalance", ""]
    return plain_table(
        head,
        [cells for _, cells in sorted(rows, key=lambda row: row[0])],
        title=f"tuned over {counted(tuning.num_steps, 'iteration')}: dispatch + combine, forward + "
        "backward",
    ).splitlines()


def plan_of_tuning(selection: Selection, tuning: Tuning, tokens_per_rank: int) -> Plan:
    """What a tuning has chosen, as a plan that a later training may use.

    Args:
        selection: what can run, priced for the traffic of the tuning; it holds the winner.
        tuning: which is over.
        tokens_per_rank: the most tokens of any rank, for which the plan is made.
    """
    winner = tuning.candidates[tuning.winner]
    price = next(
        price for price in selection.prices if (price.chain.name, price.num_chunks) == winner.key
    )
    plan = plan_of(replace(selection, price=price))
    measured = {
        candidate.key: us
        for candidate, us in zip(tuning.candidates, tuning.measured_us, strict=True)
        if us is not None
    }
    return replace(
        plan,
        reason=_reason(tuning),
        key=replace(plan.key, tokens_per_rank=tokens_per_rank),
        candidates=tuple(
            _as_measured(candidate, measured, winner.key) for candidate in plan.candidates
        ),
    )


def plan_path(path: str, stage: int, num_stages: int) -> Path:
    """Where a pipeline stage writes its plan: plan.yaml, or plan.1.yaml if there are several."""
    whole = Path(path)
    return whole if num_stages == 1 else whole.with_suffix(f".{stage}{whole.suffix}")


def _reason(tuning: Tuning) -> str:
    """What was measured, and what was predicted instead."""
    winner, measured_us = tuning.candidates[tuning.winner], tuning.measured_us
    us = measured_us[tuning.winner]
    over = f"measured over {counted(tuning.num_steps, 'iteration')}"
    if us is None:
        return f"{over}: not often enough to know better; predicted {winner.predicted_us:,.0f} us"
    others = [
        (other_us, other)
        for other_us, other in zip(measured_us, tuning.candidates, strict=True)
        if other_us is not None and other is not winner
    ]
    compared = ""
    if others:
        other_us, other = min(others, key=lambda entry: entry[0])
        compared = (
            f", {other_us / us:.2f}x as fast as {other.name}, the next"
            if other_us >= us
            else f", within the margin of {MARGIN:.0%} of {other.name} ({other_us:,.0f} us)"
        )
    return f"{over}: {us:,.0f} us{compared}; predicted {winner.predicted_us:,.0f} us"


def _as_measured(
    candidate: Candidate, measured_us: dict[tuple[str, int], float], winner: tuple[str, int]
) -> Candidate:
    """A candidate with what the tuning says of it, where it was measured."""
    if candidate.num_chunks is None or candidate.rejected is None:
        return candidate
    us = measured_us.get((candidate.chain, candidate.num_chunks))
    if us is None:
        return candidate
    change = us / measured_us[winner] - 1
    return replace(candidate, rejected=f"measured {us:,.0f} us, {change:+.0%}")
