"""Train the quickstart's model in bf16 with tokens as they are and in eight bits.

    MONTA_CPU_RANKS=1 OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 \\
        .venv/bin/python scripts/quickstart/eight_bits.py --iterations 200
"""

import argparse
import json
import sys

from one_run import FOLDER, Run, train
from prepare_text import prepare, read_texts
from trainings import ON_ONE_MACHINE, RANKS_PER_NODE, megatron_arguments

NUM_LAST_LOSSES = 10
MONTA = ["--moe-token-dispatcher-type", "monta", "--moe-monta-chain", "hierarchical_alltoall"]
WIRE = ["--moe-monta-wire-dtype", "fp8"]
TRAININGS = {
    "alltoall": ["--moe-token-dispatcher-type", "alltoall"],
    "bf16": MONTA,
    "fp8": [*MONTA, *WIRE],
    "fp8, gradients too": [*MONTA, *WIRE, "--moe-monta-wire-backward"],
}


def main() -> int:
    """Train all of them from the same seed and compare their losses with stock's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200, help="default: 200")
    iterations = parser.parse_args().iterations
    FOLDER.mkdir(parents=True, exist_ok=True)
    arguments = megatron_arguments(
        ON_ONE_MACHINE, prepare(read_texts([]), FOLDER / "data"), iterations
    )
    arguments += [
        "--bf16",
        "--expert-model-parallel-size",
        "4",
        "--expert-tensor-parallel-size",
        "1",
    ]
    runs: dict[str, Run] = {}
    print(f"{'training':20}{'first':>10}{'last 10':>10}{'against stock':>15}", flush=True)
    for name, ours in TRAININGS.items():
        nodes = ["--moe-monta-ranks-per-node", str(RANKS_PER_NODE)] if name != "alltoall" else []
        label = f"eight-bits-{name.replace(', ', '-').replace(' ', '-')}"
        runs[name] = train(label, [*ours, *nodes], arguments, iterations)
        mean, stock = (
            sum(run.losses[-NUM_LAST_LOSSES:]) / NUM_LAST_LOSSES
            for run in (runs[name], runs["alltoall"])
        )
        print(
            f"{name:20}{runs[name].losses[0]:10.5f}{mean:10.5f}{mean / stock - 1:+15.2%}",
            flush=True,
        )
    losses = {name: run.losses for name, run in runs.items()}
    (FOLDER / "eight_bits.json").write_text(json.dumps(losses, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
