"""Times that no schedule beats, for a plan to show."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from monta_megatron.chains.program import ResourceOrCompute
from monta_megatron.planner.pricing import PassPrice
from monta_megatron.planner.schedule import Factor, Work, serial_us


def pass_lower_bound_us(price: PassPrice, factor: Factor) -> float:
    """A lower bound of a whole pass: that of its program, with what surrounds it."""
    after_us = sum(sum(work.times_us) for work in price.after)
    if not (price.waits or price.program.pass_.ids):
        # Its host may be ahead of it.
        unled = [replace(work, launch_us=0.0) for work in (*price.before, *price.pipeline)]
        before, pipeline = unled[: len(price.before)], unled[len(price.before) :]
        return serial_us(before) + lower_bound_us(pipeline, factor) + after_us
    around_us = price.host_us + serial_us(price.before)
    after_us = serial_us(price.after) if price.waits else after_us
    return around_us + lower_bound_us(price.pipeline, factor) + after_us


def lower_bound_us(works: Sequence[Work], factor: Factor) -> float:
    """A time that no schedule beats: the busiest resource, the host, the longest stage."""
    bounds = [sum(work.launch_us * len(work.times_us) for work in works)]
    for resource in get_args(ResourceOrCompute):
        times = [sum(work.times_us) for work in works if work.resource == resource]
        if times:
            # n operations on one resource run together at n / slowdown of its rate.
            slowdown = 1 + (len(times) - 1) * (min(factor(resource, resource), 2.0) - 1)
            bounds += [sum(times) * slowdown / len(times), max(times)]
    return max(bounds)
