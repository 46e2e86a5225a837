"""Random layouts, routings, dtypes and chunks: every chain gives what the reference gives.

`scripts/property_tests.py` runs more of them, or one of them alone.
"""

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import TypeVar

import pytest
from exchanges import DTYPES, ROUTINGS, SHAPES, Case, cases_on, check, check_many
from pool import Pool, Pools

C = TypeVar("C")

# In the ordinary test run; scripts/property_tests.py runs more.
NUM_CASES = {4: 300, 8: 50}
BATCH = 50


def draw_cases(world_size: int, seed: int) -> Iterator[Case]:
    """Exchanges of tiny rows without end: every chain on every shape in turn."""
    draw = random.Random(seed)
    for case in cycle(cases_on(SHAPES[world_size])):
        dtype, probs_dtype = draw.choice(DTYPES)
        num_chunks = draw.randint(1, 7)
        yield dataclasses.replace(
            case,
            num_local_experts=draw.randint(1, 3),
            topk=draw.randint(1, 4),
            tokens=tuple(draw.choice((0, 1, draw.randint(2, 12), 40)) for _ in range(case.size)),
            hidden=draw.choice((8, 3, 1)),
            dtype=dtype,
            probs_dtype=probs_dtype,
            routing=draw.choice(ROUTINGS),
            num_chunks=num_chunks,
            num_blocks=num_chunks + draw.randint(0, 3),
            seed=draw.randrange(2**31),
        )


def run_cases(pool: Pool, check: Callable[[C], list[str]], cases: Iterator[C]) -> None:
    """Check cases, in batches, because a call costs more than a case.

    Raises:
        AssertionError: cases failed: their parameters, and what differed.
    """
    while batch := list(islice(cases, BATCH)):
        found = {each for result in pool.run(check_many, batch, check) for each in result}
        failures: dict[str, list[str]] = {}
        for position, line in sorted(found):
            # As scripts/property_tests.py takes it.
            case = json.dumps(dataclasses.asdict(batch[position]))
            failures.setdefault(case, []).append(line)
        assert not failures, "\n    ".join(
            line for case, lines in failures.items() for line in (f"\n{case}", *lines)
        )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", sorted(NUM_CASES))
def test_every_chain_gives_what_the_reference_gives(pools: Pools, world_size: int) -> None:
    cases = islice(draw_cases(world_size, seed=0), NUM_CASES[world_size])
    run_cases(pools[world_size], check, cases)
