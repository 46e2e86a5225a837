"""Iteration time of a training that waits for the network: `monta` against `alltoall`, emulated.

    .venv/bin/python scripts/quickstart/iteration_time.py --inter-mbit 200 --cluster CLUSTER.yaml

Megatron's own training loop on 2 emulated nodes x 4 CPU ranks, EP 8: the quickstart's model with
more experts of a smaller size, top-8, so that an iteration is mostly exchange. The trainings
alternate (monta, alltoall, alltoall, monta, ...), so that a machine that slows down slows both. The
router is forced to balance its load, so the choices of experts are the same, and every loss has to
agree to a relative 1e-6.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from main import QuickstartError, error_lines, read_record
from prepare_text import VOCAB_SIZE, prepare, read_texts

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runs" / "iteration_time"

NODES, RANKS_PER_NODE = 2, 4
SEQUENCE_LENGTH, MICRO_BATCH_SIZE = 512, 2
DISPATCHERS = ("monta", "alltoall")
# The first iterations of each training, in which connections and plans are made.
NUM_WARMUP_ITERATIONS = 2
LARGEST_LOSS_DIFFERENCE = 1e-6

ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        dispatcher: "monta" or "alltoall".
        iteration_ms: times as Megatron prints them, without the warm-up iterations.
        losses: unrounded, one per iteration.
        dispatch: what ran, as train.py records it.
    """

    dispatcher: str
    iteration_ms: list[float]
    losses: list[float]
    dispatch: dict[str, Any]


def megatron_arguments(data_prefix: Path, options: argparse.Namespace) -> list[str]:
    """Everything but the dispatcher."""
    # This imports torch, which takes seconds, so not before the command line has been checked.
    from monta_megatron.emulation.cpu_ranks import CPU_RANKS_ARGUMENTS

    arguments = f"""
        --num-layers {options.layers} --hidden-size {options.hidden} --num-attention-heads 4
        --ffn-hidden-size 64 --moe-ffn-hidden-size 32
        --seq-length {SEQUENCE_LENGTH} --max-position-embeddings {SEQUENCE_LENGTH}
        --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
        --num-experts 64 --moe-router-topk 8 --moe-router-dtype fp32
        --moe-router-load-balancing-type none --moe-router-force-load-balancing
        --expert-model-parallel-size {NODES * RANKS_PER_NODE}
        --micro-batch-size {MICRO_BATCH_SIZE}
        --global-batch-size {MICRO_BATCH_SIZE * NODES * RANKS_PER_NODE}
        --train-iters {options.iterations} --eval-iters 0 --eval-interval {options.iterations}
        --lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --seed 1234
        --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --split 100,0,0
        --distributed-timeout-minutes 5 --log-interval 1
    """.split()
    data = ["--data-path", str(data_prefix), "--data-cache-path", str(data_prefix.parent / "cache")]
    return [*arguments, *data, *CPU_RANKS_ARGUMENTS]


def train(name: str, dispatcher: str, arguments: Sequence[str], options: argparse.Namespace) -> Run:
    """One training on an emulated cluster of its own.

    Raises:
        QuickstartError: it failed; the text holds the ranks' errors.
    """
    log, record = FOLDER / f"{name}.log", FOLDER / f"{name}.jsonl"
    record.write_text("")
    chosen = ["--moe-token-dispatcher-type", dispatcher]
    if dispatcher == "monta":
        chosen += ["--moe-monta-chain", options.chain]
        if options.cluster is not None:
            chosen += ["--moe-monta-cluster", str(options.cluster)]
    command = [
        *(sys.executable, "-m", "monta_megatron.cli", "emulate", "--nodes", str(NODES)),
        *("--ranks-per-node", str(RANKS_PER_NODE), "--inter-mbit", f"{options.inter_mbit:g}", "--"),
        *(str(Path(__file__).with_name("train.py")), "--record", str(record)),
        *chosen,
        *arguments,
    ]
    with log.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    if status != 0:
        raise QuickstartError(f"training with {name} failed\n{error_lines(log)}\nlog: {log}")
    elapsed_ms = [float(text) for text in ELAPSED.findall(log.read_text(errors="replace"))]
    entries = read_record(record)
    return Run(
        dispatcher=dispatcher,
        iteration_ms=elapsed_ms[NUM_WARMUP_ITERATIONS:],
        losses=[entry["loss"] for entry in entries if "loss" in entry],
        dispatch=entries[-1],
    )


def summarise(runs: Sequence[Run], options: argparse.Namespace) -> dict[str, Any]:
    """What summary.json holds; `ratio` is alltoall's median iteration over monta's."""
    from monta_megatron.common.provenance import commit, machine, versions
    from monta_megatron.tools.bench.statistics import ratio_interval

    times_ms = {
        name: np.array([ms for run in runs if run.dispatcher == name for ms in run.iteration_ms])
        for name in DISPATCHERS
    }
    medians_ms = {name: float(np.median(times)) for name, times in times_ms.items()}
    low, high = ratio_interval(times_ms["alltoall"], times_ms["monta"])
    return {
        "ratio": medians_ms["alltoall"] / medians_ms["monta"],
        "ratio_low": low,
        "ratio_high": high,
        "median_iteration_ms": medians_ms,
        "max_rel_loss_diff": max(
            abs(loss - stock) / abs(stock)
            for run in runs
            for loss, stock in zip(run.losses, _stock_losses(runs), strict=True)
        ),
        "inter_mbit": options.inter_mbit,
        "layout": {"nodes": NODES, "ranks_per_node": RANKS_PER_NODE, "ep": NODES * RANKS_PER_NODE},
        "model": {
            "layers": options.layers,
            "hidden": options.hidden,
            "experts": 64,
            "top_k": 8,
            "tokens_per_rank": SEQUENCE_LENGTH * MICRO_BATCH_SIZE,
            "dtype": "float32",
        },
        "runs": [vars(run) for run in runs],
        "versions": versions(),
        "machine": machine(),
        "commit": commit(),
        "command": " ".join(sys.argv),
    }


def _stock_losses(runs: Sequence[Run]) -> list[float]:
    return next(run.losses for run in runs if run.dispatcher == "alltoall")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inter-mbit", type=float, default=200, help="default: 200")
    parser.add_argument("--cluster", type=Path, help="by which monta's planner chooses")
    parser.add_argument("--chain", default="auto", help="of monta (default: auto)")
    parser.add_argument("--pairs", type=int, default=2, help="trainings of each (default: 2)")
    parser.add_argument("--iterations", type=int, default=8, help="of a training (default: 8)")
    parser.add_argument("--layers", type=int, default=2, help="all of experts (default: 2)")
    parser.add_argument("--hidden", type=int, default=256, help="default: 256")
    options = parser.parse_args()
    if options.iterations <= NUM_WARMUP_ITERATIONS:
        parser.error(
            f"--iterations: got {options.iterations}, must be above {NUM_WARMUP_ITERATIONS}, the "
            "number that warm up"
        )
    FOLDER.mkdir(parents=True, exist_ok=True)
    data_prefix = prepare(read_texts([]), FOLDER / "data")
    arguments = megatron_arguments(data_prefix, options)

    runs: list[Run] = []
    try:
        for pair in range(options.pairs):
            for dispatcher in DISPATCHERS if pair % 2 == 0 else DISPATCHERS[::-1]:
                runs.append(train(f"{dispatcher}-{pair}", dispatcher, arguments, options))
                middle_ms = np.median(runs[-1].iteration_ms)
                print(f"pair {pair + 1}  {dispatcher:<8}  {middle_ms:.0f} ms", flush=True)
    except QuickstartError as error:
        print(f"iteration_time: FAILED: {error}", file=sys.stderr)
        return 1

    summary = summarise(runs, options)
    path = FOLDER / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    difference = summary["max_rel_loss_diff"]
    print(
        f"an iteration takes {summary['median_iteration_ms']['alltoall']:.0f} ms with alltoall, "
        f"{summary['median_iteration_ms']['monta']:.0f} ms with monta: {summary['ratio']:.2f} "
        f"times faster ({summary['ratio_low']:.2f} to {summary['ratio_high']:.2f})\n"
        f"largest relative difference of a loss: {difference:.2g}\n{path.relative_to(ROOT)}"
    )
    if not difference <= LARGEST_LOSS_DIFFERENCE:
        print(f"iteration_time: FAILED: must be at most {LARGEST_LOSS_DIFFERENCE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
