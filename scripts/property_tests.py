#!/usr/bin/env python3
"""Compare random exchanges, many more than the ordinary tests do, or one alone.

    scripts/property_tests.py --cases 20000
    scripts/property_tests.py --against stock --cases 20000
    scripts/property_tests.py --world-size 8 --case '{"chain": "allgather", ...}'

Against the reference it is the exchange alone; against stock it is the dispatcher, with options
mixed. A case that fails is printed as --case takes it.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "dist"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import exchanges
import layers
import test_dispatcher_properties as of_dispatchers
import test_exchange_properties as of_exchanges
from pool import Pool

from monta_megatron.common.rules import whole

# Kind of a case, what checks one on a rank, what draws them, and cases of each world size, in
# relation.
COMPARISONS: dict[str, tuple[Any, Any, Any, dict[int, int]]] = {
    "reference": (
        exchanges.Case,
        exchanges.check,
        of_exchanges.draw_cases,
        of_exchanges.NUM_CASES,
    ),
    "stock": (layers.Case, layers.check, of_dispatchers.draw_cases, {4: 19, 8: 1}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", choices=COMPARISONS, default="reference")
    parser.add_argument("--cases", type=whole(1), default=20000, help="shared among world sizes")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing")
    parser.add_argument(
        "--world-size", type=int, choices=sorted(exchanges.SHAPES), help="ranks of --case"
    )
    parser.add_argument("--case", help="one case as JSON, as a failure prints it")
    arguments = parser.parse_args()
    if arguments.case is not None and arguments.world_size is None:
        parser.error("--case: needs the --world-size of its ranks")

    kind, check, draw, shares = COMPARISONS[arguments.against]
    if arguments.case is not None:
        shares = {arguments.world_size: 1}
    try:
        for world_size, share in shares.items():
            num_cases = -(-arguments.cases * share // sum(shares.values()))
            rounds = drawn_rounds(draw, world_size, num_cases, arguments.seed)
            if arguments.case is not None:
                rounds = iter([iter([kind(**json.loads(arguments.case))])])
            began = time.monotonic()
            for cases in rounds:
                with closing(Pool(world_size)) as pool:
                    of_exchanges.run_cases(pool, check, cases)
            seconds = time.monotonic() - began
            print(f"{world_size} ranks: none differs, {seconds:.0f} s", flush=True)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def drawn_rounds(draw: Any, world_size: int, num_cases: int, seed: int) -> Iterator[Iterator[Any]]:
    """So many cases; the ranks start again for each round."""
    at_once = of_dispatchers.CASES_PER_POOL
    for number, first in zip(count(), range(0, num_cases, at_once), strict=False):
        # Seeds of rounds, far from those of other runs.
        yield islice(draw(world_size, 1000 * seed + number), min(at_once, num_cases - first))


if __name__ == "__main__":
    sys.exit(main())
