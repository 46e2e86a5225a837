"""Causes of a slow exchange: links, host, copies, imbalance, experts in the pipeline, memory."""

import re
from collections.abc import Iterator

from monta_megatron.chains.program import LINKS, Resource
from monta_megatron.common.units import GB_BYTES, gb_text, time_text
from monta_megatron.planner.online.drift import BAND
from monta_megatron.planner.select import MARGIN
from monta_megatron.tools.run_doctor.figures import (
    NAMES,
    PLACE,
    ExchangeFigures,
    Finding,
    LinkChange,
    RunFigures,
    each_alone,
    eight_bits,
    faster_chain,
    less_time,
    named,
    of_exchange_ms,
)

WHERE = {"inter": "between nodes", "intra": "inside nodes"}


def slower_link(run: RunFigures, least: float) -> Iterator[Finding]:
    """A link that became slower, or carries its messages slower than the cluster file says."""
    of, changes = run.exchange, _changes(run)
    for resource, noticed in changes.items():
        change = noticed.change
        ranks = ", ".join(map(str, change.ranks))
        times = sum(each.change.resource == resource for each in run.changes)
        others = f"; the worst of {times} exchanges that say so" if times > 1 else ""
        yield Finding(
            name="slower link",
            kind="measured",
            held_ms=None if of is None else _link_ms(of, resource) * (1 - change.rate_ratio),
            says=f"{change.text}; {change.rate_ratio:.0%} of its rate is left{others}",
            rests_on=noticed.basis,
            advice=(
                f"look at the {NAMES[resource]} of ranks {ranks}: errors, a failed port, "
                "another job",
                "leave their nodes out; or, if it stays so, monta calibrate",
            ),
        )
    for resource in LINKS:
        left = _rate_left(run, resource, least)
        if of is None or resource in changes or left == 1:
            continue
        ms = of.link_ms.get(resource, 0.0)
        predicted = time_text(1e3 * ms * left, beside_us=1e3 * ms)
        yield Finding(
            name="slower link",
            kind="measured",
            held_ms=_link_ms(of, resource) * (1 - left),
            says=f"the {NAMES[resource]} carries its messages at {left:.0%} of the rate that auto "
            f"plans with: {time_text(1e3 * ms)} measured, {predicted} predicted",
            rests_on=of.basis,
            advice=(
                "look for another job" + " and the wrong network interface" * (resource == "inter"),
                "if the nodes have changed since: monta calibrate, and --moe-monta-cluster with "
                "what it writes",
            ),
        )


def link(run: RunFigures, least: float) -> Iterator[Finding]:
    """The link that carries most of the exchange's time, and its share at its own rate."""
    of = run.exchange
    if of is None or of.exchange_ms <= 0:
        return
    resource = max(LINKS, key=lambda resource: _link_ms(of, resource))
    ms = _link_ms(of, resource)
    if ms < least * of.exchange_ms:
        return
    ratio = _over_predicted(of, resource)
    rate = "" if ratio is None else f", at {1 / ratio:.0%} of the rate that auto plans with"
    yield Finding(
        name=NAMES[resource],
        kind="measured" if of.link_ms else "predicted",
        # A rate below its own is another finding.
        held_ms=ms * _rate_left(run, resource, BAND),
        says=f"the {NAMES[resource]} ({WHERE[resource]}) is busy for {ms / of.exchange_ms:.0%} of "
        f"the exchange{rate}; {each_alone(of)}",
        rests_on=of.basis,
        advice=(
            *faster_chain(run.what_if),
            *eight_bits(run.what_if),
            "monta plan without a layout: another ep or tp may send less",
            PLACE,
        ),
    )


def _rate_left(run: RunFigures, resource: str, least: float) -> float:
    """Remaining rate of a link: after a change, or where it takes `least` times as long."""
    changes = _changes(run)
    if resource in changes:
        return changes[resource].change.rate_ratio
    ratio = None if run.exchange is None else _over_predicted(run.exchange, resource)
    return 1 / ratio if ratio is not None and ratio >= least else 1.0


def _changes(run: RunFigures) -> dict[Resource, LinkChange]:
    """The worst change of each link: exchanges that share it notice the same one."""
    milder = sorted(run.changes, key=lambda noticed: -noticed.change.rate_ratio)
    return {noticed.change.resource: noticed for noticed in milder}


def _over_predicted(of: ExchangeFigures, resource: str) -> float | None:
    """Measured over predicted time of a link, where the prediction says how fast it should be."""
    return of.link_over_predicted.get(resource) if resource in of.calibrated_links else None


def _link_ms(of: ExchangeFigures, resource: str) -> float:
    """For how long a link is busy; collectives that wait for each other are timed twice."""
    return min((of.link_ms or of.busy_ms).get(resource, 0.0), of.exchange_ms)


def host(run: RunFigures, least: float) -> Iterator[Finding]:
    """The host takes longer to start the operations than the links to carry their bytes."""
    of = run.exchange
    links_ms = [] if of is None else [of.busy_ms.get(resource, 0.0) for resource in LINKS]
    if of is None or of.busy_ms.get("host", 0.0) < max(links_ms):
        return
    advice = [
        *faster_chain(run.what_if),
        "--moe-monta-kernels auto with Triton, if it is torch: fewer launches, the same bits",
        "larger micro-batches",
    ]
    if of.num_chunks > 1:
        advice.append("--moe-monta-num-chunks 1, or plain --moe-monta-chain alltoall")
    says = "starting the operations takes the host longer than carrying their bytes takes the links"
    yield from _on_rank(run, "host", least, says, tuple(advice))


def copies(run: RunFigures, least: float) -> Iterator[Finding]:
    """Rows are copied and summed on the ranks for longer than anything else takes."""
    advice = (
        *faster_chain(run.what_if),
        "--moe-monta-kernels auto with Triton, if it is torch: rows are moved once",
    )
    says = "rows are copied and summed on the ranks"
    yield from _on_rank(run, "memory", least, says, advice)


def _on_rank(
    run: RunFigures, resource: str, least: float, says: str, advice: tuple[str, ...]
) -> Iterator[Finding]:
    """Predicted share of a rank's resource, which is not timed."""
    of = run.exchange
    if of is None or of.predicted_ms <= 0:
        return
    part = min(of.busy_ms.get(resource, 0.0) / of.predicted_ms, 1.0)
    if part >= least:
        yield Finding(
            name=NAMES[resource],
            kind="predicted",
            held_ms=part * of.exchange_ms,
            says=f"{says}: {part:.0%} of the exchange; {each_alone(of)}",
            rests_on=of.basis,
            advice=advice,
        )


# A balanced rank's rows times this.
OVERLOADED = 1.2
# Said to be the same ranks: late in so many of the iterations.
SAME_RANKS = 2 / 3


def overload(run: RunFigures, least: float) -> Iterator[Finding]:
    """Experts of a rank that get more rows than those of others."""
    of = run.exchange
    if of is None or of.avg_overload_factor is None or of.avg_overload_factor < least:
        return
    factor, most = of.avg_overload_factor, of.max_overload_factor
    yield Finding(
        name="imbalance of the experts",
        kind="measured",
        held_ms=of.exchange_ms * (1 - 1 / factor),
        says=f"the most loaded rank gets {factor:.2f} times the rows of a balanced one, and "
        f"{most:.2f} times at the most: exchange and experts end with it",
        rests_on=of.basis,
        advice=(
            "--moe-router-load-balancing-type aux_loss with a larger --moe-aux-loss-coeff; or, "
            "with sigmoid scores, --moe-router-enable-expert-bias",
            "--moe-expert-capacity-factor X, which drops tokens",
            PLACE,
        ),
    )


def waiting(run: RunFigures, least: float) -> Iterator[Finding]:
    """Ranks that come late to the exchange: always the same, or one or the other."""
    of = run.exchange
    if of is None or of.imbalance is None or of.imbalance < least:
        return
    same = sorted(rank for rank, part in of.slowest_ranks.items() if part >= SAME_RANKS)
    who = "not always the same ranks come late"
    advice = ["if sequences differ in length: pack them, or sort them by their tokens"]
    if same:
        late = f"rank{'s' * (len(same) > 1)} {', '.join(map(str, same))}"
        who = f"the others wait for {late} nearly always"
        advice = [f"look at the device and node of {late}: clocks, heat, other processes"]
    if (of.avg_overload_factor or 0.0) >= OVERLOADED:
        who += "; a rank whose experts get more rows comes late by that alone"
        advice.insert(0, "balance the experts first")
    yield Finding(
        name="ranks that wait",
        kind="measured",
        held_ms=of.exchange_ms * of.imbalance,
        says=f"the exchange takes {of.imbalance:.0%} longer on the rank that waits most; {who}",
        rests_on=of.basis,
        advice=(*advice, "--moe-monta-record DIR, and monta timeline DIR: who waits for whom"),
    )


def experts(run: RunFigures, least: float) -> Iterator[Finding]:
    """Time hidden by splitting the experts, at the most and by the planner."""
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
    """Findings on memory: from the log, and the cost of a limit."""
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
