"""What several rules say alike: choices, and what the planner expects of them."""

from collections.abc import Iterator

from monta_megatron.common.units import counted, time_text
from monta_megatron.planner.chain_price import RESOURCE_NAMES
from monta_megatron.planner.select import MARGIN
from monta_megatron.tools.run_doctor.figures import Choice, ExchangeFigures, RunFigures, WhatIf

PLACE = "monta place: experts on ranks by a trace of the router"
NAMES = {**RESOURCE_NAMES, "memory": "copies in memory", "host": "host"}


def of_exchange_ms(run: RunFigures, part: float) -> float | None:
    """A part of the exchange's predicted time, of the time that it takes."""
    return None if run.exchange is None else part * run.exchange.exchange_ms


def named(choice: Choice) -> str:
    """A chain in its chunks."""
    return f"{choice.chain} in {counted(choice.num_chunks, 'chunk')}"


def less_time(choice: Choice, ran: Choice) -> str:
    """By how much a choice is faster than what ran."""
    return f"{1 - choice.us / ran.us:.0%} less time, predicted"


def each_alone(of: ExchangeFigures) -> str:
    """How long each resource was predicted to be busy."""
    longest_us = 1e3 * max(of.busy_ms.values(), default=0.0)
    parts = (
        f"{NAMES[resource]} {time_text(1e3 * ms, longest_us)}"
        for resource, ms in of.busy_ms.items()
    )
    return f"predicted of each alone: {', '.join(parts)}"


def faster_chain(what_if: WhatIf | None) -> Iterator[str]:
    """The chain that is predicted to be faster than one that was named."""
    if what_if is None:
        yield "monta plan with model, cluster and layout: what each chain would take"
    elif what_if.is_named and what_if.fastest.us < what_if.ran.us * (1 - MARGIN):
        fastest = what_if.fastest
        yield f"--moe-monta-chain auto: {named(fastest)} takes {less_time(fastest, what_if.ran)}"


def eight_bits(what_if: WhatIf | None) -> Iterator[str]:
    """Tokens in eight bits, where they are predicted to pay."""
    other = None if what_if is None else what_if.eight_bits
    if what_if is not None and other is not None and other.us < what_if.ran.us * (1 - MARGIN):
        less = less_time(other, what_if.ran)
        yield f"--moe-monta-wire-dtype fp8: {less}; it rounds what the experts get"
