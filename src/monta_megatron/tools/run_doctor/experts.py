"""Experts in the pipeline: asked for in vain, or not asked for though it would gain."""

from collections.abc import Iterator

from monta_megatron.common.units import time_text
from monta_megatron.tools.run_doctor.figures import Finding, RunFigures
from monta_megatron.tools.run_doctor.wording import named, of_exchange_ms


def experts(run: RunFigures, least: float) -> Iterator[Finding]:
    """What splitting them would hide, at the most and by the planner."""
    what_if = run.what_if
    if what_if is None or what_if.experts_pipelined or what_if.ran.us <= 0:
        return
    experts_us, exchange_us, split = what_if.experts_us, what_if.ran.us, what_if.split
    gain_us = 0.0 if split is None else what_if.unsplit.us - split.us
    gain = gain_us / what_if.unsplit.us
    held_ms = of_exchange_ms(run, max(gain_us, 0.0) / exchange_us)
    both = (
        f"{time_text(experts_us, exchange_us)} of experts beside "
        f"{time_text(exchange_us, experts_us)} of exchange in a layer and micro-batch, predicted"
    )
    if not what_if.experts_asked and split is not None and gain >= least:
        yield Finding(
            name="experts outside the pipeline",
            kind="predicted",
            held_ms=held_ms,
            says=f"{both}: with experts in the pipeline, in {named(split)}, a layer takes "
            f"{gain:.0%} less",
            rests_on=what_if.basis,
            advice=("--moe-monta-overlap-experts; auto then neither tunes nor watches",),
        )
    elif what_if.experts_asked and gain < least:
        # No schedule hides more than the shorter of the two.
        most_us = min(experts_us, exchange_us)
        best = "no chain can be split here"
        if split is not None:
            best = f"the best that can be had, {named(split)}, changes a layer by {-gain:+.0%}"
        yield Finding(
            name=f"{'experts' if experts_us < exchange_us else 'exchange'} too short to split",
            kind="predicted",
            held_ms=held_ms,
            says=f"{both}: no split hides more than {most_us / (experts_us + exchange_us):.0%} of "
            f"a layer; {best}",
            rests_on=what_if.basis,
            advice=(
                "leave --moe-monta-overlap-experts out: auto then tunes and watches",
                "larger micro-batches: what a chunk costs by itself weighs less",
            ),
        )
