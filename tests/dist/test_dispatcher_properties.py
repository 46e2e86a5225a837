"""Random dispatchers give what stock's dispatcher gives, whatever the routing map and the options.

`scripts/property_tests.py --against stock` runs more of them, or one of them alone.
"""

import importlib.util
import random
from collections.abc import Iterator

import pytest
from dispatchers import Case, check_many
from exchanges import ROUTINGS
from faults import with_fault
from pool import Pool, Pools
from test_exchange_properties import (
    DTYPES,
    SHAPES,
    case_from,
    command,
    run_cases,
    runnable,
)

from monta_megatron.chains import CHAINS

# In the ordinary test run.
NUM_CASES = {4: 48}
# Megatron makes some twenty groups for a layout, and each keeps threads as long as its processes:
# so few layouts in each life of the ranks, of so many cases.
SHAPES_PER_POOL = 3
CASES_PER_POOL = 400
HAS_TRITON = importlib.util.find_spec("triton") is not None


def draw_case(draw: random.Random, shapes: list[tuple[int, int, int]], world_size: int) -> Case:
    """A dispatcher on one of some shapes, with tiny rows, and options that go together."""
    is_auto = chance(draw, 0.05)
    named = [each for each in runnable(world_size) if each[1] in shapes]
    name, shape = ("auto", draw.choice(shapes)) if is_auto else draw.choice(named)
    ep, etp, ranks_per_node = shape
    of_tokens = not is_auto and CHAINS[name].rows == "tokens"
    dtype, probs_dtype = draw.choice(DTYPES)
    # A planner takes longer than a case: a few configurations, which it is asked for again.
    num_local_experts = 2 if is_auto else draw.randint(1, 3)

    topk = 2 if is_auto else draw.randint(1, min(ep * num_local_experts, 4))
    routing = draw.choice([*ROUTINGS, "no_expert", "empty_rank", "router"])
    # Chains of tokens refuse to fill experts up.
    capacities = ["", "", "", "drop", "drop" if of_tokens else "pad"]
    capacity = draw.choice(capacities) if routing != "router" else ""
    num_tokens = draw.choice([3, 12, 24])
    # A router needs some, and ranks fill experts up to the same capacity.
    least = 1 if routing == "router" else 0
    tokens = [draw.randint(least, num_tokens) for _ in range(world_size)]
    if capacity == "pad":
        tokens = [max(tokens)] * world_size if any(tokens) else [1] * world_size

    pipelined = (of_tokens or is_auto) and chance(draw, 0.25)
    is_tuned = is_auto and chance(draw, 0.5)
    fused = HAS_TRITON and of_tokens and dtype == "float32" and chance(draw, 0.05)
    is_training = chance(draw, 0.9)
    recomputes = ["", "", "reentrant", "not reentrant"]
    return Case(
        chain=name,
        ep=ep,
        etp=etp,
        ranks_per_node=ranks_per_node,
        num_local_experts=num_local_experts,
        topk=topk,
        tokens=tuple(tokens),
        hidden=draw.choice([8, 32, 40, 64]),
        dtype=dtype,
        probs_dtype=probs_dtype,
        routing=routing,
        capacity=capacity,
        num_chunks=1 if is_auto or CHAINS[name].serial else draw.randint(1, 7),
        num_steps=draw.randint(1, 6 + 4 * is_tuned) if is_auto else draw.choice([1, 1, 2]),
        is_tuned=is_tuned,
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


def cases_of_pool(world_size: int, seed: int) -> Iterator[Case]:
    """Cases without end on a few shapes, so that the ranks make few groups."""
    draw = random.Random(seed)
    shapes = draw.sample(SHAPES[world_size], SHAPES_PER_POOL)
    while True:
        yield draw_case(draw, shapes, world_size)


def run_dispatchers(pool: Pool, num_cases: int, seed: int) -> None:
    """Compare so many dispatchers with stock's; see `run_cases`."""
    run_cases(pool, check_many, cases_of_pool(pool.world_size, seed), num_cases)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", sorted(NUM_CASES))
def test_every_dispatcher_gives_what_stock_gives(pools: Pools, world_size: int) -> None:
    run_dispatchers(pools[world_size], NUM_CASES[world_size], seed=0)


def test_a_case_survives_its_command_line() -> None:
    case = Case(chain="auto", tokens=(3, 0, 1, 7), routing="no_expert", flat=True, seed=5)
    assert case_from(Case, command(4, case).split("'")[1]) == case


def test_a_missing_row_is_reported_with_its_case(pools: Pools) -> None:
    """Planted: the rows of a chunk stay away."""
    cases = [
        Case(chain="hierarchical_alltoall", num_chunks=2, num_blocks=2, seed=seed)
        for seed in range(2)
    ]
    for found in pools[4].run(with_fault, "chunk of dispatch missing", check_many, cases):
        assert {position for position, _ in found} == {0, 1}
