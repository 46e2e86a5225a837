#!/usr/bin/env python3
"""Compare random exchanges with the reference: many more than the ordinary tests, or one alone.

    scripts/property_tests.py --cases 20000
    scripts/property_tests.py --world-size 8 --case '{"chain": "allgather", ...}'

A case that fails is printed with its parameters and with the command that runs it alone.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "dist"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from exchanges import check_many
from pool import Pool
from test_exchange_properties import NUM_CASES, SHAPES, case_from, run_properties


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", type=int, default=20000, help="shared among world sizes as in the tests"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the drawing")
    parser.add_argument(
        "--world-size", type=int, choices=sorted(SHAPES), help="this one alone; all unless given"
    )
    parser.add_argument("--case", help="one case as JSON, as a failure prints it")
    arguments = parser.parse_args()
    if arguments.cases < 1:
        parser.error(f"--cases: got {arguments.cases}, must be at least 1")
    if arguments.case is not None and arguments.world_size is None:
        parser.error("--case: needs the --world-size that was printed with it")

    world_sizes = sorted(SHAPES) if arguments.world_size is None else [arguments.world_size]
    ordinary = sum(NUM_CASES[world_size] for world_size in world_sizes)
    for world_size in world_sizes:
        pool = Pool(world_size)
        try:
            if arguments.case is not None:
                case = case_from(arguments.case)
                results = pool.run(check_many, [case])
                lines = {line for result in results for _, line in result}
                print("\n".join(sorted(lines)) or "equal to the reference")
                return 1 if lines else 0
            num_cases = -(-arguments.cases * NUM_CASES[world_size] // ordinary)
            began = time.monotonic()
            run_properties(pool, num_cases, arguments.seed)
            seconds = time.monotonic() - began
            print(
                f"{world_size} ranks: {num_cases} cases, none differs, {seconds:.0f} s", flush=True
            )
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
