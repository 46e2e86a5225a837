"""Train the quickstart's model on every chain and compare each loss with Megatron's `alltoall`.

    .venv/bin/python scripts/quickstart/all_chains.py

The router is forced to balance its load: it chooses experts anew from the seed, so a different last
bit never changes a choice. Chains whose sums have stock's order must give the same losses; where
partial sums move, by a relative 1e-6 at most. Over more than 20 iterations differences grow.
"""

import argparse
import sys
from dataclasses import dataclass

from one_run import QuickstartError, Run, train
from trainings import ON_ONE_MACHINE, RANKS_PER_NODE

from monta_megatron.tools.compare import largest_difference

TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Case:
    """A chain and the layout that it trains on: TP 2, and EP x ETP over all four ranks."""

    chain: str
    ep: int
    etp: int
    largest_difference: float = TOLERANCE


CASES = (
    Case(chain="alltoall", ep=2, etp=2, largest_difference=0.0),
    Case(chain="alltoall_allgather", ep=2, etp=2, largest_difference=0.0),
    Case(chain="allgather", ep=2, etp=2),
    Case(chain="hierarchical_allgather", ep=2, etp=2),
    Case(chain="alltoall_dedup", ep=4, etp=1),
    Case(chain="hierarchical_alltoall", ep=4, etp=1),
)


def train_case(dispatcher: str, case: Case, iterations: int) -> Run:
    """Run one training, with stock's dispatcher or on the chain."""
    arguments = ["--moe-router-force-load-balancing", "--moe-token-dispatcher-type", dispatcher]
    arguments += ["--expert-model-parallel-size", str(case.ep)]
    arguments += ["--expert-tensor-parallel-size", str(case.etp)]
    if dispatcher == "alltoall":
        return train(f"stock-ep{case.ep}", ON_ONE_MACHINE, arguments, iterations)
    arguments += ["--moe-monta-chain", case.chain]
    arguments += ["--moe-monta-ranks-per-node", str(RANKS_PER_NODE)]
    return train(case.chain, ON_ONE_MACHINE, arguments, iterations)


def main() -> int:
    """Train all cases; 1 if one differs by more than it may."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=20, help="of each training (default: 20)")
    iterations = parser.parse_args().iterations
    stock: dict[int, Run] = {}
    failed = False
    for case in CASES:
        try:
            if case.ep not in stock:
                stock[case.ep] = train_case("alltoall", case, iterations)
            run = train_case("monta", case, iterations)
        except QuickstartError as error:
            print(f"all_chains: FAILED: {error}", file=sys.stderr)
            return 1
        difference = largest_difference([run.losses], stock[case.ep].losses)
        holds = difference <= case.largest_difference
        failed = failed or not holds
        print(f"{case.chain:24}{difference:10.2e}  {'ok' if holds else 'FAILED'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
