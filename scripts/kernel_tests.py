#!/usr/bin/env python3
"""Compare Triton kernels with PyTorch operations: many more random cases than the ordinary tests.

    scripts/kernel_tests.py --cases 2000
    scripts/kernel_tests.py --first 1234 --cases 1

They run in Triton's interpreter, without a GPU. A case that fails is printed with its seed.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from kernel_cases import check

from monta_megatron.common.rules import whole

BATCH = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=whole(1), default=2000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    arguments = parser.parse_args()
    began, end = time.monotonic(), arguments.first + arguments.cases
    try:
        for first in range(arguments.first, end, BATCH):
            check(first, min(first + BATCH, end))
            print(f"seeds below {min(first + BATCH, end)}: none differs", file=sys.stderr)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{arguments.cases} cases, none differs, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
