"""Lines of a training's log, from Megatron's loop and the dispatcher, and their summary."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

from monta_megatron.planner.benefit import Benefit
from monta_megatron.tools.launch.prepare import Run

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

    @property
    def ms_per_iteration(self) -> float | None:
        """The median; without the first one logged, which starts everything."""
        times_ms = list(self.times_ms.values())
        return median(times_ms[1:] or times_ms) if times_ms else None


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


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run that has ended.

    Attributes:
        iterations: the last one logged; None if there is none.
        first_loss: the first loss logged.
        last_loss: the last one.
        ms_per_iteration: the median; without the first one logged, which starts everything.
        chain: what ran last, in the dispatcher's words.
        planned_inter_bytes: payload between nodes as planned, of all ranks of an exchange, for one
            layer and micro-batch; None without a plan, or if another chain ran.
        planned_intra_bytes: the same inside the nodes.
        benefit: what the planner expects that chain to gain; None as above.
        log: the file that this comes from.
    """

    iterations: int | None
    first_loss: float | None
    last_loss: float | None
    ms_per_iteration: float | None
    chain: str | None
    planned_inter_bytes: float | None
    planned_intra_bytes: float | None
    benefit: Benefit | None
    log: str

    def document(self) -> dict[str, Any]:
        """All of it for JSON, which knows no NaN: a loss that is none is a text."""
        document = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }
        return {**document, "benefit": None if self.benefit is None else self.benefit.document()}

    def lines(self) -> list[str]:
        """One line for each thing that is known."""
        lines = []
        if self.first_loss is not None and self.last_loss is not None:
            lines.append(f"loss: {self.first_loss:.6g} at first, {self.last_loss:.6g} at last")
        if self.iterations is not None and self.ms_per_iteration is not None:
            lines.append(f"iterations: {self.iterations}, {self.ms_per_iteration:,.1f} ms each")
        if self.chain is not None:
            lines.append(f"chain: {self.chain}")
        if self.planned_inter_bytes is not None and self.planned_intra_bytes is not None:
            lines.append(
                "bytes per layer and micro-batch, as planned: "
                f"{self.planned_inter_bytes:,.0f} between nodes, "
                f"{self.planned_intra_bytes:,.0f} inside"
            )
        if self.benefit is not None:
            lines.append(f"benefit: {self.benefit.text}")
        return [*lines, f"log: {self.log}"]


def summary_of(run: Run) -> Summary:
    """The summary of a run that has ended, whether or not it came to its end."""
    log = run.directory / "logs" / "run.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    read = read_log(text)
    losses = list(read.losses.values())
    chosen = None if run.plan is None else run.plan.chosen
    as_planned = (
        chosen is not None and read.chain is not None and read.chain.split()[0] == chosen.chain
    )
    return Summary(
        iterations=read.last_iteration,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        ms_per_iteration=read.ms_per_iteration,
        chain=read.chain,
        planned_inter_bytes=chosen.inter_bytes if chosen is not None and as_planned else None,
        planned_intra_bytes=chosen.intra_bytes if chosen is not None and as_planned else None,
        benefit=run.benefit if as_planned else None,
        log=str(log),
    )
