"""Train the quickstart's model with its experts whole and with its experts inside the pipeline.

    .venv/bin/python scripts/quickstart/experts_pipelined.py --iterations 50

The experts' intermediate size is 256, so that there is something to hide, and the chain is named.
"""

import argparse
import sys

from one_run import Run, largest_difference, train
from trainings import OVER_A_NETWORK

from monta_megatron.tools.compare import order_of, speedup

INTER_MBIT = 200.0
ARGUMENTS = [
    *("--moe-token-dispatcher-type", "monta", "--moe-ffn-hidden-size", "256"),
    *("--moe-monta-chain", "hierarchical_alltoall", "--moe-monta-num-chunks", "4"),
]
EXPERTS = {"whole": [], "pipelined": ["--moe-monta-overlap-experts"]}


def main() -> int:
    """Train both in turn and compare times of an iteration and losses; 1 if losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=50, help="of each (default: 50)")
    parser.add_argument("--pairs", type=int, default=3, help="trainings of each (default: 3)")
    options = parser.parse_args()
    runs: dict[str, list[Run]] = {name: [] for name in EXPERTS}
    for pair in range(options.pairs):
        for name in order_of(pair, tuple(EXPERTS)):
            arguments = [*ARGUMENTS, *EXPERTS[name]]
            label = f"experts-{name}-{pair + 1}"
            run = train(label, OVER_A_NETWORK, arguments, options.iterations, INTER_MBIT)
            runs[name].append(run)
    ratio, interval = speedup(*([run.log.iteration_ms() for run in runs[name]] for name in EXPERTS))
    bounds = "" if interval is None else " ({:.2f} to {:.2f})".format(*interval)
    difference = largest_difference(
        [run.losses for run in runs["pipelined"]], runs["whole"][0].losses
    )
    print(
        f"{ratio:.2f} times as fast{bounds}, largest relative difference of a loss {difference:.1e}"
    )
    return int(not difference <= OVER_A_NETWORK.largest_difference)


if __name__ == "__main__":
    sys.exit(main())
