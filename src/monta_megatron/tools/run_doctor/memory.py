"""Memory: a rank ran out of it or nearly did, or a limit rules out what would be faster."""

import re
from collections.abc import Iterator

from monta_megatron.common.units import GB_BYTES, gb_text
from monta_megatron.planner.select import MARGIN
from monta_megatron.tools.run_doctor.figures import Finding, RunFigures
from monta_megatron.tools.run_doctor.wording import less_time, named, of_exchange_ms

LONGEST_LINE = 160
# Of the kernel and of Slurm: it was the host's memory.
OF_HOST = re.compile(r"oom.kill", re.IGNORECASE)
LESS_ON_HOST = ("more of the node's memory for the job, or a smaller --num-workers",)
LESS = (
    "--moe-monta-memory-limit-gb X: auto then takes a chain, or more chunks, that hold less",
    "--moe-monta-node-ctas 4: a quarter of the buffers inside nodes",
    "more recomputation, or a larger pp, ep or tp",
)


def memory(run: RunFigures, least: float) -> Iterator[Finding]:
    """What the log says of it; what a limit costs."""
    of, what_if = run.memory, run.what_if
    part = 0.0
    if of.allocated_bytes is not None and of.rank_bytes is not None:
        part = of.allocated_bytes / of.rank_bytes
    if of.out_of_memory is not None or part >= least:
        line = of.out_of_memory or ""
        of_host = OF_HOST.search(line) is not None
        says = f"a rank ran out of memory: {line.strip()[:LONGEST_LINE]}"
        if of.out_of_memory is None:
            says = (
                f"a rank had {gb_text(of.allocated_bytes or 0.0)} allocated, {part:.0%} of the "
                f"{gb_text(of.rank_bytes or 0.0)} that the cluster file gives it"
            )
        if of.exchange_bytes is not None and not of_host:
            says += f"; the exchange holds up to {gb_text(of.exchange_bytes)}, predicted"
        yield Finding(
            name="memory",
            kind="measured",
            # A training is laid out to fill its memory: that alone costs no time.
            held_ms=0.0 if of.out_of_memory is None else None,
            says=says,
            rests_on=of.basis,
            advice=LESS_ON_HOST if of_host else LESS,
        )
    if what_if is None or of.limit_bytes is None:
        return
    faster, ran = what_if.fastest, what_if.ran
    if faster.peak_bytes > of.limit_bytes and faster.us < ran.us * (1 - MARGIN):
        yield Finding(
            name="memory limit",
            kind="predicted",
            held_ms=of_exchange_ms(run, 1 - faster.us / ran.us),
            says=f"the limit of {gb_text(of.limit_bytes)} rules out {named(faster)}, which holds "
            f"{gb_text(faster.peak_bytes)} and takes {less_time(faster, ran)}",
            rests_on=what_if.basis,
            # Rounded up, or it would not be enough.
            advice=(f"--moe-monta-memory-limit-gb {faster.peak_bytes / GB_BYTES * 1.01:.3g}",),
        )
