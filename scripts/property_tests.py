#!/usr/bin/env python3
"""Compare random exchanges, many more than the ordinary tests do, or one alone.

    scripts/property_tests.py --cases 20000
    scripts/property_tests.py --against stock --cases 20000
    scripts/property_tests.py --world-size 8 --case '{"chain": "allgather", ...}'

Against the reference it is the exchange alone; against stock it is the dispatcher, with options
mixed. A case that fails is printed with its parameters and with the command that runs it alone.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "dist"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import dispatchers
import exchanges
import layers
import test_dispatcher_properties as of_dispatchers
import test_exchange_properties as of_exchanges
from pool import Pool

from monta_megatron.common.rules import whole


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        case: class of a case.
        check_many: checks them on a rank.
        draw: draws cases without end: (world size, seed).
        shares: cases of each world size, in relation.
        cases_per_pool: after which the ranks start again; None for never.
    """

    case: type
    check_many: Callable[[list[Any]], list[tuple[int, str]]]
    draw: Callable[[int, int], Iterator[Any]]
    shares: dict[int, int]
    cases_per_pool: int | None


COMPARISONS = {
    "reference": Comparison(
        exchanges.Case,
        exchanges.check_many,
        of_exchanges.draw_cases,
        of_exchanges.NUM_CASES,
        None,
    ),
    "stock": Comparison(
        layers.Case,
        dispatchers.check_many,
        of_dispatchers.draw_cases,
        {4: 19, 8: 1},
        of_dispatchers.CASES_PER_POOL,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", choices=COMPARISONS, default="reference")
    parser.add_argument("--cases", type=whole(1), default=20000, help="shared among world sizes")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing")
    parser.add_argument(
        "--world-size", type=int, choices=sorted(of_exchanges.SHAPES), help="ranks of --case"
    )
    parser.add_argument("--case", help="one case as JSON, as a failure prints it")
    arguments = parser.parse_args()
    if arguments.case is not None and arguments.world_size is None:
        parser.error("--case: needs the --world-size that was printed with it")

    comparison = COMPARISONS[arguments.against]
    if arguments.case is not None:
        case = of_exchanges.case_from(comparison.case, arguments.case)
        with closing(Pool(arguments.world_size)) as pool:
            results = pool.run(comparison.check_many, [case])
        lines = {line for result in results for _, line in result}
        print("\n".join(sorted(lines)) or f"equal to the {arguments.against}")
        return 1 if lines else 0
    try:
        for world_size, share in comparison.shares.items():
            num_cases = -(-arguments.cases * share // sum(comparison.shares.values()))
            began = time.monotonic()
            run_in_pools(comparison, world_size, num_cases, arguments.seed)
            seconds = time.monotonic() - began
            print(
                f"{world_size} ranks: {num_cases} cases, none differs, {seconds:.0f} s", flush=True
            )
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def run_in_pools(comparison: Comparison, world_size: int, num_cases: int, seed: int) -> None:
    """Run so many cases, on ranks that start again where they are to.

    Raises:
        AssertionError: a case failed.
    """
    at_once = comparison.cases_per_pool or num_cases
    for first in range(0, num_cases, at_once):
        with closing(Pool(world_size)) as pool:
            # Seeds of rounds, far from those of other runs.
            cases = comparison.draw(world_size, 1000 * seed + first // at_once)
            number = min(at_once, num_cases - first)
            of_exchanges.run_cases(pool, comparison.check_many, cases, number)


if __name__ == "__main__":
    sys.exit(main())
