"""Trainings of one model that differ in the dispatcher alone: times, ratio, losses. No torch."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from monta_megatron.tools.bench.statistics import ratio_interval, ratio_of_medians
from monta_megatron.tools.launch.training_log import TrainingLog

STOCK = "alltoall"
# The first iterations of a training, in which connections, buffers and plans are made.
NUM_WARMUP_ITERATIONS = 2


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One dispatcher's trainings against stock's.

    Attributes:
        dispatcher: its name, as Megatron's argument has it.
        median_ms: time of an iteration, without those that warm up; None if the log has none.
        ratio: stock's median over this one; None where either is missing.
        ratio_low: its 95% interval over the iterations; None for stock itself.
        ratio_high: likewise.
        max_loss_difference: the largest difference of a loss from stock's of the same iteration,
            relative to the larger one; NaN if a loss is none, None if no iteration has both.
        peak_memory_bytes: the most that a rank had allocated; None if the log does not say.
        chain: of monta, in its own words.
    """

    dispatcher: str
    median_ms: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    max_loss_difference: float | None
    peak_memory_bytes: float | None
    chain: str | None


def in_turn(dispatchers: Sequence[str], pairs: int) -> Iterator[tuple[int, str]]:
    """(pair, dispatcher) in the order in which they train.

    A machine that slows down slows the later of two: each dispatcher is the first one in turn.
    """
    for pair in range(pairs):
        for dispatcher in dispatchers if pair % 2 == 0 else dispatchers[::-1]:
            yield pair, dispatcher


def compare(logs: Sequence[tuple[str, TrainingLog]]) -> tuple[Compared, ...]:
    """Each dispatcher against stock, in the order of their first trainings.

    Args:
        logs: (dispatcher, log) of every training; stock's `alltoall` is among them.
    """
    names = dict.fromkeys(name for name, _ in logs)
    by_name = {name: [log for other, log in logs if other == name] for name in names}
    stock = by_name[STOCK]
    stock_ms = np.array(timed_ms(stock))
    rows = []
    for name, mine in by_name.items():
        times_ms = np.array(timed_ms(mine))
        # Drawn together by repeat, so as many of one as of the other.
        num_both = min(len(times_ms), len(stock_ms))
        ratio = low = high = None
        if num_both:
            ratio = ratio_of_medians(stock_ms, times_ms)
            if name != STOCK:
                low, high = ratio_interval(stock_ms[:num_both], times_ms[:num_both])
        peaks = [log.peak_memory_bytes for log in mine if log.peak_memory_bytes is not None]
        rows.append(
            Compared(
                dispatcher=name,
                median_ms=float(np.median(times_ms)) if len(times_ms) else None,
                ratio=ratio,
                ratio_low=low,
                ratio_high=high,
                max_loss_difference=largest_difference(
                    [log.losses for log in mine], stock[0].losses
                ),
                peak_memory_bytes=max(peaks, default=None),
                chain=mine[-1].chain,
            )
        )
    return tuple(rows)


def timed_ms(logs: Iterable[TrainingLog]) -> list[float]:
    """The times of the iterations that count, of all logs."""
    return [ms for log in logs for n, ms in log.times_ms.items() if n > NUM_WARMUP_ITERATIONS]


def largest_difference(
    trainings: Iterable[Mapping[int, float]], stock: Mapping[int, float]
) -> float | None:
    """The largest relative difference of a loss; None if no iteration has two, NaN if one is NaN.

    Args:
        trainings: iteration -> loss, of each training.
        stock: iteration -> loss.
    """
    differences = [
        0.0
        if losses[n] == stock[n]
        else abs(losses[n] - stock[n]) / max(abs(losses[n]), abs(stock[n]))
        for losses in trainings
        for n in losses.keys() & stock.keys()
    ]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=None)
