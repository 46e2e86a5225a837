"""Results of tuning windows, as a training logs them."""

from collections.abc import Sequence

from monta_megatron.core import Choice
from monta_megatron.integration.auto import result_line
from monta_megatron.planner.tuning import TuningWindow, Workload

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
