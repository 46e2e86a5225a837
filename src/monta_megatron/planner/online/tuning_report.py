"""Result of a tuning as a table for the log."""

from monta_megatron.common.tables import table
from monta_megatron.common.units import counted
from monta_megatron.planner.online.tuning import Tuning


def tuning_table(tuning: Tuning) -> list[str]:
    """Predicted and measured times of the candidates, the fastest first, as lines for the log.

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
    return table(
        ["chain", ">chunks", ">predicted us", ">measured us", "", ">runs", ">imbalance", ""],
        [cells for _, cells in sorted(rows, key=lambda row: row[0])],
        title=f"tuned over {counted(tuning.num_steps, 'iteration')}: dispatch + combine, forward + "
        "backward",
    ).splitlines()
