"""Lines of a training's log, from Megatron's loop and the dispatcher."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Entry = TypeVar("Entry")

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


def not_repeated(entries: Iterable[tuple[int, Entry]]) -> list[tuple[int, Entry]]:
    """Records of a training by iteration, without those that it went back behind.

    One that starts again, from a checkpoint or from the beginning, goes on in the same file.
    """
    kept: list[tuple[int, Entry]] = []
    for iteration, entry in entries:
        while kept and kept[-1][0] >= iteration:
            kept.pop()
        kept.append((iteration, entry))
    return kept


def read_log(text: str) -> RunLog:
    """The log of a training that has ended, whether or not it came to its end."""
    lines = not_repeated(
        (int(match[1]), line) for line in text.splitlines() if (match := ITERATION.search(line))
    )
    peaks_mib = [float(peak) for peak in PEAK_MIB.findall(text)]
    chains = CHAIN.findall(text)
    return RunLog(
        times_ms={n: float(match[1]) for n, line in lines if (match := TIME_MS.search(line))},
        losses={n: float(match[1]) for n, line in lines if (match := LOSS.search(line))},
        last_iteration=lines[-1][0] if lines else None,
        # A rank without an accelerator says 0.
        peak_memory_bytes=max(peaks_mib, default=0.0) * 2**20 or None,
        chain=chains[-1] if chains else None,
    )
