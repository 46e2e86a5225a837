"""Results of tuning windows, as a training logs them."""

from collections.abc import Sequence

from monta_megatron.core import Choice
from monta_megatron.integration.auto import result_line
from monta_megatron.planner.tuning import STEPS_TO_SECOND, TuningWindow, Workload

ALLTOALL, ALLGATHER = (Choice(chain=name, num_chunks=1) for name in ("alltoall", "allgather"))


def logged_result(ranks: Sequence[int], first: int, winner: Choice) -> str:
    """The line of a window of these two, three trials each, from step `first` on."""
    predicted_us = {ALLTOALL: 300.0, ALLGATHER: 200.0}
    window = TuningWindow(candidates=predicted_us, first=first, num_steps=6)
    for step in range(first, window.end):
        workload = Workload(num_exchanges=2, tokens=64)
        window.add_trial(step, workload)
        window.add_time(step, 9_000 if window.candidate_of(step) == winner else 10_000)
    return f"monta: {result_line(ranks, window.result, 1.25)}"


def logged_windows(seconds: Sequence[Choice]) -> list[str]:
    """Lines of two pipeline stages: first windows, late, and second ones with these winners."""
    stages = (0, 1), (2, 3)
    firsts = [(stages[0], 0, ALLGATHER), (stages[1], STEPS_TO_SECOND - 1, ALLGATHER)]
    later = zip(stages, (STEPS_TO_SECOND, STEPS_TO_SECOND + 1), seconds, strict=False)
    return [logged_result(*window) for window in (*firsts, *later)]
