"""What a run has come to, from its log: the lines that Megatron and the dispatcher print."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from monta_megatron.planner.benefit import Benefit
from monta_megatron.tools.launch.prepare import Run
from monta_megatron.tools.launch.training_log import read_log


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run that has ended.

    Attributes:
        iterations: the last one logged; None if there is none.
        first_loss: the first loss logged.
        last_loss: the last one.
        ms_per_iteration: the median; without the first one logged, which starts everything.
        chain: the chain that ran last, with chunks and sizes, in the dispatcher's words.
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
        chosen is not None and read.chain is not None and read.chain.split(",")[0] == chosen.chain
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
