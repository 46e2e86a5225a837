"""Random dispatchers give what stock's dispatcher gives, whatever the routing map and the options.

`scripts/property_tests.py --against stock` runs more of them, or one of them alone.
"""

import importlib.util
import random
from collections.abc import Iterator

import pytest
from dispatchers import DROP, PAD, check_many
from exchanges import ROUTINGS
from layers import Case
from pool import Pools
from test_exchange_properties import (
    DTYPES,
    SHAPES,
    cases_on,
    run_cases,
)

from monta_megatron.chains import CHAINS

# In the ordinary test run.
NUM_CASES = 48
# Megatron makes some twenty groups for a layout, and each keeps threads as long as its processes:
# so few layouts in each life of the ranks, of so many cases.
SHAPES_PER_POOL = 3
CASES_PER_POOL = 400
# Of a tuning window, with trials of two candidates.
TUNE_STEPS = 6
HAS_TRITON = importlib.util.find_spec("triton") is not None


def draw_case(draw: random.Random, shapes: list[tuple[int, int, int]], world_size: int) -> Case:
    """A dispatcher on one of some shapes, with tiny rows, and options that go together."""
    is_auto = chance(draw, 0.05)
    named = [case for case in cases_on(world_size) if case.shape in shapes]
    place = draw.choice(named)
    name = "auto" if is_auto else place.chain
    of_tokens = not is_auto and CHAINS[name].rows == "tokens"
    dtype, probs_dtype = draw.choice(DTYPES)
    # A planner takes longer than a case: a few configurations, which it is asked for again.
    num_local_experts = 2 if is_auto else draw.randint(1, 3)

    topk = 2 if is_auto else draw.randint(1, min(place.ep * num_local_experts, 4))
    routing = draw.choice([*ROUTINGS, "no_expert", "empty_rank", "router"])
    # Chains of tokens refuse to fill experts up.
    config = draw.choice([{}, {}, {}, DROP, DROP if of_tokens else PAD])
    if routing == "router":
        config = {}
    num_tokens = draw.choice([3, 12, 24])
    # A router needs some, and ranks fill experts up to the same capacity.
    least = 1 if routing == "router" else 0
    tokens = [draw.randint(least, num_tokens) for _ in range(world_size)]
    if config == PAD:
        tokens = [max(tokens)] * world_size if any(tokens) else [1] * world_size

    pipelined = (of_tokens or is_auto) and chance(draw, 0.25)
    is_tuned = is_auto and chance(draw, 0.5)
    fused = HAS_TRITON and of_tokens and dtype == "float32" and chance(draw, 0.05)
    is_training = chance(draw, 0.9)
    recomputes = ["", "", "reentrant", "not reentrant"]
    return Case(
        chain=name,
        ep=place.ep,
        etp=place.etp,
        ranks_per_node=place.ranks_per_node,
        num_local_experts=num_local_experts,
        topk=topk,
        tokens=tuple(tokens),
        width=draw.choice([8, 32, 40, 64]),
        dtype=dtype,
        probs_dtype=probs_dtype,
        routing=routing,
        config=config,
        options={"tune_steps": TUNE_STEPS if is_tuned else 0} if is_auto else {},
        num_chunks=None if is_auto else 1 if CHAINS[name].serial else draw.randint(1, 7),
        num_steps=draw.randint(1, 6 + 4 * is_tuned) if is_auto else draw.choice([1, 1, 2]),
        pipelined=pipelined,
        fused=fused,
        flat=chance(draw, 0.3),
        strided=chance(draw, 0.3),
        is_training=is_training,
        recompute=draw.choice(recomputes) if is_training else "",
        checked=chance(draw, 0.1),
        seed=draw.randrange(2**31),
    )


def chance(draw: random.Random, probability: float) -> bool:
    return draw.random() < probability


def draw_cases(world_size: int, seed: int) -> Iterator[Case]:
    """Cases without end on a few shapes, so that the ranks make few groups."""
    draw = random.Random(seed)
    shapes = draw.sample(SHAPES[world_size], SHAPES_PER_POOL)
    while True:
        yield draw_case(draw, shapes, world_size)


@pytest.mark.timeout(600)
def test_every_dispatcher_gives_what_stock_gives(pools: Pools) -> None:
    run_cases(pools[4], check_many, draw_cases(4, seed=0), NUM_CASES)
