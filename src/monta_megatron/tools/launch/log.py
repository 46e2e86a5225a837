"""Lines of a training's log, from Megatron's loop and the dispatcher."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Megatron's line: `iteration 2/ 10 | ... | elapsed time per iteration (ms): 81.4 | ... |
# lm loss: 5.4E+00 | ...`.
ITERATION = re.compile(r"\biteration +(\d+)/ *\d+ \|")
TIME_MS = re.compile(r"elapsed time per iteration \(ms\): (\d+(?:\.\d+)?)")
LOSS = re.compile(r"\blm loss: (-?\d+(?:\.\d+)?(?:E[-+]\d+)?|nan|-?inf)(?=[\s|])", re.IGNORECASE)
# `(after 2 iterations) memory (MB) | ... | max allocated: 951.91 | ...`, of some of the ranks.
PEAK_MIB = re.compile(r"\bmemory \(MB\) \|.*?\| max allocated: (\d+(?:\.\d+)?)")
# The dispatcher's lines: `monta: alltoall in 1 chunk, EP 8 x ETP 1 over 2 nodes: as asked for`;
# `monta: auto, EP 8 x ETP 1 over 2 nodes: alltoall in 1 chunk, planned on ...`; `... wins with`.
CHAIN = re.compile(
    r"^(?:\[node \d+ rank \d+\] )?monta(?:, rank \d+)?: (?:auto, [^:]+: )?"
    r"(\w+ in \d+ chunks?(?: with their experts)?)(?:, EP |, planned on | wins with )",
    re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """The log of one training.

    Attributes:
        times_ms: iteration -> its time, where it was logged.
        losses: iteration -> its loss, rounded to seven digits by Megatron.
        last_iteration: the last one logged; None if there is none.
        peak_memory_bytes: the most that a rank had allocated when Megatron last said so; None if it
            never did.
        chain: what ran last, in the dispatcher's words: "alltoall in 1 chunk".
    """

    times_ms: Mapping[int, float]
    losses: Mapping[int, float]
    last_iteration: int | None
    peak_memory_bytes: float | None
    chain: str | None


def read_log(text: str) -> RunLog:
    """The log of a training that has ended, whether or not it came to its end.

    A training that starts again, from a checkpoint or from the beginning, goes on in the same file;
    iterations that it runs again count once.
    """
    lines: dict[int, str] = {}
    last = None
    for line in text.splitlines():
        if match := ITERATION.search(line):
            iteration = int(match[1])
            if last is not None and iteration <= last:
                lines = {number: lines[number] for number in lines if number < iteration}
            lines[iteration], last = line, iteration
    peaks_mib = [float(peak) for peak in PEAK_MIB.findall(text)]
    chains = CHAIN.findall(text)
    return RunLog(
        times_ms=_values(TIME_MS, lines),
        losses=_values(LOSS, lines),
        last_iteration=last,
        # A rank without an accelerator says 0.
        peak_memory_bytes=max(peaks_mib, default=0.0) * 2**20 or None,
        chain=chains[-1] if chains else None,
    )


def _values(pattern: re.Pattern[str], lines: Mapping[int, str]) -> dict[int, float]:
    """The number of each iteration, where its line has one."""
    return {n: float(match[1]) for n, line in lines.items() if (match := pattern.search(line))}
