"""Random layouts, routings, dtypes and chunks: every chain gives what the reference gives.

`scripts/property_tests.py` runs more of them, or one of them alone.
"""

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, TypeVar

import layers
import pytest
from exchanges import ROUTINGS, Case, check_many
from pool import Pool, PoolError, Pools

from monta_megatron.chains import CHAINS

C = TypeVar("C")

# (ep, etp, ranks per node) by world size. On 8 ranks the exchanges of 4 are two, side by side.
# Fixed, so that every process group is made once.
SHAPES: dict[int, list[tuple[int, int, int]]] = {
    4: [
        *((4, 1, ranks_per_node) for ranks_per_node in (4, 3, 2, 1)),
        *((2, 2, ranks_per_node) for ranks_per_node in (4, 2, 1)),
        (1, 4, 4),
        *((2, 1, ranks_per_node) for ranks_per_node in (2, 1)),
        (1, 2, 2),
    ],
    8: [
        *((8, 1, ranks_per_node) for ranks_per_node in (8, 5, 4, 2, 1)),
        *((4, 2, ranks_per_node) for ranks_per_node in (8, 4, 2)),
        *((2, 4, ranks_per_node) for ranks_per_node in (8, 4)),
        *((4, 1, ranks_per_node) for ranks_per_node in (4, 2)),
        (2, 2, 2),
    ],
}
# (dtype of the rows, dtype of the probabilities)
DTYPES = [
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float64", "float64"),
]
# In the ordinary test run; scripts/property_tests.py runs more.
NUM_CASES = {4: 500, 8: 50}
BATCH = 50


def cases_on(world_size: int) -> list[Case]:
    """Every chain with every shape that it accepts."""
    cases = [
        Case(chain=chain, ep=ep, etp=etp, ranks_per_node=ranks_per_node)
        for chain in CHAINS
        for ep, etp, ranks_per_node in SHAPES[world_size]
    ]
    return [case for case in cases if CHAINS[case.chain].incompatibility(case.layout(0)) is None]


def draw_cases(world_size: int, seed: int) -> Iterator[Case]:
    """Exchanges of tiny rows without end: every chain on every shape in turn."""
    draw = random.Random(seed)
    for case in cycle(cases_on(world_size)):
        dtype, probs_dtype = draw.choice(DTYPES)
        num_chunks = 1 if CHAINS[case.chain].serial else draw.randint(1, 7)
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


def run_cases(
    pool: Pool,
    check_many: Callable[[list[C]], list[tuple[int, str]]],
    drawn: Iterator[C],
    num_cases: int,
) -> None:
    """Check the first cases of those drawn, in batches, because a call costs more than a case.

    Raises:
        AssertionError: a case failed; see `failures_of`.
    """
    for first in range(0, num_cases, BATCH):
        cases = list(islice(drawn, min(BATCH, num_cases - first)))
        failures = failures_of(pool, check_many, cases)
        assert not failures, "\n".join([f"after {first} cases:", *failures[:10]])


def failures_of(
    pool: Pool, check_many: Callable[[list[C]], list[tuple[int, str]]], cases: list[C]
) -> list[str]:
    """The cases of a batch that fail: their parameters, what differed, and how to run each alone.

    Args:
        pool: the ranks.
        check_many: what they run; the position of each case that fails, and how.
        cases: what it takes.
    """
    try:
        results = pool.run(check_many, cases)
    except PoolError as error:
        return [str(error)]
    lines: dict[int, list[str]] = {}
    for position, line in sorted({each for result in results for each in result}):
        lines.setdefault(position, []).append(line)
    return [
        "\n    ".join([repr(cases[position]), *found, command(pool.world_size, cases[position])])
        for position, found in lines.items()
    ]


def command(world_size: int, case: Any) -> str:
    """The command that runs one case alone."""
    text = json.dumps(dataclasses.asdict(case))
    against = "" if type(case) is Case else " --against stock"
    return f"scripts/property_tests.py{against} --world-size {world_size} --case '{text}'"


def case_from(kind: type[C], text: str) -> C:
    """The case that `command` wrote."""
    fields = json.loads(text)
    return kind(**{**fields, "tokens": tuple(fields["tokens"])})


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", sorted(NUM_CASES))
def test_every_chain_gives_what_the_reference_gives(pools: Pools, world_size: int) -> None:
    cases = draw_cases(world_size, seed=0)
    run_cases(pools[world_size], check_many, cases, NUM_CASES[world_size])


@pytest.mark.parametrize(
    "case",
    [
        Case(chain="alltoall", tokens=(3, 0, 1, 7), routing="capacity", seed=5),
        layers.Case(chain="auto", tokens=(3, 0, 1, 7), options={"tune_steps": 6}, flat=True),
    ],
)
def test_a_case_survives_its_command_line(case: Case) -> None:
    assert case_from(type(case), command(4, case).split("'")[1]) == case
