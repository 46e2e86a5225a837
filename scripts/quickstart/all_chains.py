"""Train the quickstart's model on every chain and compare each loss with Megatron's `alltoall`.

    MONTA_CPU_RANKS=1 OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 \\
        .venv/bin/python scripts/quickstart/all_chains.py --iterations 50

Chains whose sums have stock's order must give the same losses. Where partial sums move, losses may
differ by a relative 1e-6: at every iteration if the router is forced to balance its load, otherwise
until the first iteration in which some token chooses another expert than in the stock run. The
means of the last losses must agree within 1%.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from one_run import FOLDER, QuickstartError, Run, train
from prepare_text import prepare, read_texts
from trainings import ON_ONE_MACHINE, RANKS_PER_NODE, megatron_arguments

TOLERANCE = 1e-6
LARGEST_DIFFERENCE_OF_MEANS = 0.01
NUM_LAST_LOSSES = 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """A chain and the layout that it trains on: TP 2, and EP x ETP over all four ranks."""

    chain: str
    ep: int
    etp: int
    same_bits: bool = False


CASES = (
    Case(chain="alltoall", ep=2, etp=2, same_bits=True),
    Case(chain="alltoall_allgather", ep=2, etp=2, same_bits=True),
    Case(chain="allgather", ep=2, etp=2),
    Case(chain="hierarchical_allgather", ep=2, etp=2),
    Case(chain="alltoall_dedup", ep=4, etp=1),
    Case(chain="hierarchical_alltoall", ep=4, etp=1),
)
ROUTERS = {"free": [], "balanced": ["--moe-router-force-load-balancing"]}


def compare(case: Case, router: str, run: Run, stock: Run) -> tuple[str, bool]:
    """A line about one training, and whether it meets the rules at the top of this file."""
    differences = [
        abs(mine - theirs) / abs(theirs)
        for mine, theirs in zip(run.losses, stock.losses, strict=True)
    ]
    # The first iteration whose choice of experts differs; its own loss already comes from them.
    chooses_alike = next(
        (
            iteration
            for iteration, (mine, theirs) in enumerate(zip(run.routing, stock.routing, strict=True))
            if mine != theirs
        ),
        len(differences),
    )
    means = [sum(training.losses[-NUM_LAST_LOSSES:]) / NUM_LAST_LOSSES for training in (run, stock)]
    apart = abs(means[0] - means[1]) / means[1]
    until = max(differences[:chooses_alike], default=0.0)
    if case.same_bits:
        holds = max(differences) == 0
    else:
        # Forced balance chooses experts anew from the seed, so they never differ.
        holds = until <= TOLERANCE and apart <= LARGEST_DIFFERENCE_OF_MEANS
        holds = holds and (router == "free" or chooses_alike == len(differences))
    other = "never" if chooses_alike == len(differences) else f"iteration {chooses_alike + 1}"
    text = (
        f"{case.chain:24}{router:10}{until:10.2e}{max(differences):10.2e}  {other:14}{apart:9.2e}"
    )
    return f"{text}  {'ok' if holds else 'FAILED'}", holds


def train_case(
    label: str,
    router: str,
    dispatcher: Sequence[str],
    case: Case,
    data_prefix: Path,
    iterations: int,
) -> Run:
    """Run one training; of an argument that is given twice, the last one counts."""
    arguments = [
        *megatron_arguments(ON_ONE_MACHINE, data_prefix, iterations),
        *("--expert-model-parallel-size", str(case.ep)),
        *("--expert-tensor-parallel-size", str(case.etp)),
        *ROUTERS[router],
        "--record-routing",
    ]
    return train(f"{label}-{router}", dispatcher, arguments, iterations)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=50, help="of each training (default: 50)")
    parser.add_argument("--router", choices=ROUTERS, help="this one alone (default: both)")
    options = parser.parse_args()
    iterations = options.iterations
    routers = [options.router] if options.router else list(ROUTERS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    data_prefix = prepare(read_texts([]), FOLDER / "data")
    results, failed = {}, False
    stocks: dict[tuple[str, int], Run] = {}
    lines = [f"{'chain':24}{'router':10}{'alike':>10}{'all':>10}  {'other experts':14}{'means':>9}"]
    print(lines[0], flush=True)
    for case in CASES:
        for router in routers:
            key = (router, case.ep)
            try:
                if key not in stocks:
                    stock = ["--moe-token-dispatcher-type", "alltoall"]
                    stocks[key] = train_case(
                        f"alltoall-ep{case.ep}", router, stock, case, data_prefix, iterations
                    )
                ours = ["--moe-token-dispatcher-type", "monta", "--moe-monta-chain", case.chain]
                ours += ["--moe-monta-ranks-per-node", str(RANKS_PER_NODE)]
                run = train_case(case.chain, router, ours, case, data_prefix, iterations)
            except QuickstartError as error:
                print(f"all_chains: FAILED: {error}", file=sys.stderr)
                return 1
            line, holds = compare(case, router, run, stocks[key])
            failed = failed or not holds
            results[f"{case.chain} {router}"] = {"losses": run.losses, "holds": holds}
            print(line, flush=True)
    (FOLDER / "all_chains.json").write_text(json.dumps(results, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
