"""The steps of the ablation of the MoNTA paper (arXiv 2411.00662), at ETP = TP. No torch.

    0  every tensor-parallel rank sends the tokens of its whole group
    1  duplicates dropped: each sends its own; A2A, then AG, then Place
    2  + A2A and AG of neighbouring chunks overlap
    3  + Place overlaps too
    4  + the number of chunks is chosen

Step 0 is Megatron without sequence parallelism, with stock's alltoall dispatcher. It moves TP
times the bytes between nodes, and nothing has to be gathered inside a node; the partial outputs are
summed once, per token rather than per (token, expert) pair, which is where the sum is cheapest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from monta_megatron.benchmark.report import Row

CHAIN = "alltoall_allgather"
# The number that the paper's published code always uses.
FIXED_NUM_CHUNKS = 4

STEPS = {
    0: "every TP rank sends its group's tokens",
    1: "duplicates dropped, A2A then AG then Place",
    2: f"A2A and AG pipelined, {FIXED_NUM_CHUNKS} chunks",
    3: "Place pipelined too",
    4: "number of chunks chosen",
}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step in one phase.

    Attributes:
        phase: "forward" or "forward_backward".
        step: see the top of this file.
        what: the step in words.
        num_chunks: number of chunks of our chain; 1 for step 0.
        chosen_by: what chose the number of chunks in step 4: "measurement" or "planner".
        median_ms: median of the slowest rank's times.
        gain: the previous step's time over this one's.
        gain_over_step_0: step 0's time over this one's.
    """

    phase: str
    step: int
    what: str
    num_chunks: int
    chosen_by: str | None
    median_ms: float
    gain: float
    gain_over_step_0: float


def ablation_steps(rows: Sequence[Row]) -> list[StepResult]:
    """The steps of every phase, each with its gain over the previous one."""
    results = []
    for phase in dict.fromkeys(row.phase for row in rows):
        of_phase = [row for row in rows if row.phase == phase and row.scope == "exchange"]
        by_step = {row.step: row for row in of_phase if row.step is not None}
        by_step[4], chosen_by = choose_num_chunks(of_phase)
        before = first = by_step[0]
        for step, what in STEPS.items():
            row = by_step[step]
            results.append(
                StepResult(
                    phase=phase,
                    step=step,
                    what=what,
                    num_chunks=row.num_chunks,
                    chosen_by=chosen_by if step == 4 else None,
                    median_ms=row.median_ms,
                    gain=before.median_ms / row.median_ms,
                    gain_over_step_0=first.median_ms / row.median_ms,
                )
            )
            before = row
    return results


def choose_num_chunks(rows: Sequence[Row]) -> tuple[Row, str]:
    """The row whose number of chunks step 4 takes, and what chose it."""
    ours = [row for row in rows if row.dispatcher == "monta" and row.step != 2]
    for row in ours:
        if row.chosen:
            return row, "planner"
    return min(ours, key=lambda row: row.median_ms), "measurement"


def ablation_table(results: Sequence[StepResult]) -> str:
    """One block per phase, 80 columns wide at most."""
    lines = []
    for result in results:
        if result.step == 0:
            lines += ["", f"ablation, {result.phase.replace('_', ' + ')}"]
            lines.append(f"{'step':<47} {'chunks':>6} {'ms':>9} {'gain':>6} {'over 0':>7}")
        by = f", by {result.chosen_by}" if result.chosen_by else ""
        lines.append(
            f"{result.step}  {result.what + by:<44} {result.num_chunks:>6} "
            f"{result.median_ms:>9.1f} {result.gain:>6.2f} {result.gain_over_step_0:>7.2f}"
        )
    return "\n".join(lines[1:])
