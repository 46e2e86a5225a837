"""Train the quickstart's model with its experts whole and with its experts inside the pipeline.

    MONTA_CPU_RANKS=1 OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 \\
        .venv/bin/python scripts/quickstart/experts_pipelined.py --iterations 50

The experts' intermediate size is 256, so that there is something to hide, and the chain is named.
"""

import argparse
import sys

from one_run import FOLDER, Run, train
from prepare_text import prepare, read_texts
from report import largest_difference
from trainings import OVER_A_NETWORK, megatron_arguments

from monta_megatron.tools.compare import interleaved, iteration_ms, speedup

CHAIN, NUM_CHUNKS = "hierarchical_alltoall", 4
EXPERTS = {"whole": [], "pipelined": ["--moe-monta-overlap-experts"]}


def main() -> int:
    """Train both in turn and compare times of an iteration and losses; 1 if losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=50, help="of each (default: 50)")
    parser.add_argument("--pairs", type=int, default=3, help="trainings of each (default: 3)")
    parser.add_argument("--inter-mbit", type=float, default=200.0, help="(default: 200)")
    parser.add_argument("--ffn-hidden", type=int, default=256, help="of an expert (default: 256)")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    data = prepare(read_texts([]), FOLDER / "data")
    arguments = megatron_arguments(OVER_A_NETWORK, data, options.iterations)
    arguments += ["--moe-ffn-hidden-size", str(options.ffn_hidden)]
    monta = ["--moe-token-dispatcher-type", "monta", "--moe-monta-chain", CHAIN]
    monta += ["--moe-monta-num-chunks", str(NUM_CHUNKS)]
    runs: dict[str, list[Run]] = {name: [] for name in EXPERTS}
    for pair, name in interleaved(tuple(EXPERTS), options.pairs):
        run = train(
            f"experts-{name}-{pair + 1}",
            [*monta, *EXPERTS[name]],
            arguments,
            options.iterations,
            options.inter_mbit,
        )
        runs[name].append(run)
        print(
            f"{name:10}{iteration_ms(run.log):8.0f} ms an iteration, last loss {run.losses[-1]:.6f}"
        )
    times_ms = ([iteration_ms(run.log) for run in runs[name]] for name in EXPERTS)
    ratio, interval = speedup(*times_ms)
    bounds = "" if interval is None else " ({:.2f} to {:.2f})".format(*interval)
    stock = runs["whole"][0].losses
    difference = max(largest_difference(run.losses, stock) for run in runs["pipelined"])
    print(
        f"{ratio:.2f} times as fast{bounds}, largest relative difference of a loss {difference:.1e}"
    )
    return int(not difference <= OVER_A_NETWORK.largest_difference)


if __name__ == "__main__":
    sys.exit(main())
