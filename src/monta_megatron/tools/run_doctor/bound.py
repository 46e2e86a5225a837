"""What an exchange is bound by: a link, slower than it should be or not; the host; copies."""

from collections.abc import Iterator

from monta_megatron.chains.program import LINKS, Resource
from monta_megatron.common.units import time_text
from monta_megatron.planner.online.drift import BAND
from monta_megatron.tools.run_doctor.figures import (
    ExchangeFigures,
    Finding,
    LinkChange,
    RunFigures,
)
from monta_megatron.tools.run_doctor.wording import (
    NAMES,
    PLACE,
    each_alone,
    eight_bits,
    faster_chain,
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
    """The link that carries most of the exchange's time: what it holds at its own rate."""
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
        # What it lacks of its rate is another finding.
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
    """What is left of a link's rate: after a change, or where it takes `least` times as long."""
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
    """What is known of a resource of a rank, which nobody times: its predicted part."""
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
