"""The quickstart: train one small GPT-MoE with `monta`, then with `alltoall`, and compare.

Four CPU ranks stand for two nodes of two GPUs. Both trainings are Megatron's own, on the same
text from the same seed; the losses of every iteration have to be the same numbers.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prepare_text import VOCAB_SIZE, prepare, read_texts
from report import ShowProgress, loss_table, progress

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runs" / "quickstart"

NODES, RANKS_PER_NODE = 2, 2
CHAIN = "alltoall_allgather"
TP = EP = ETP = 2
SEQUENCE_LENGTH = 128
MICRO_BATCH_SIZE = 4
# Two data-parallel ranks, one micro-batch each: every iteration has one loss.
GLOBAL_BATCH_SIZE = MICRO_BATCH_SIZE * NODES * RANKS_PER_NODE // TP

# The mean of the last losses has to be at most this fraction of the first loss.
NUM_LAST_LOSSES = 10
LARGEST_LAST_OVER_FIRST = 0.75

STOCK_DISPATCHER = "MoEAlltoAllTokenDispatcher"
MONTA_DISPATCHER = "MontaTokenDispatcher"


class QuickstartError(Exception):
    """A training failed, or did not do what the quickstart is there to show."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one training left in its record.

    Attributes:
        losses: unrounded, one per iteration.
        dispatch: "dispatcher", "chain" and "num_chunks", each the list of distinct values over
            layers and ranks, and "bytes" sent by resource, over all ranks.
        routing: a hash of all tokens' experts per iteration, if they were recorded.
    """

    losses: list[float]
    dispatch: dict[str, Any]
    seconds: float
    routing: list[str]


def megatron_arguments(data_prefix: Path, iterations: int) -> list[str]:
    """Everything but the dispatcher; both trainings get the same."""
    # These import torch, which takes seconds, so not before the command line has been checked.
    # torch itself is named because its import is what switches the CPU ranks on.
    import torch  # noqa: F401

    from monta_megatron.emulation.cpu_ranks import CPU_RANKS_ARGUMENTS

    arguments = f"""
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256
        --seq-length {SEQUENCE_LENGTH} --max-position-embeddings {SEQUENCE_LENGTH}
        --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
        --num-experts 8 --moe-router-topk 2
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
        --tensor-model-parallel-size {TP} --sequence-parallel
        --expert-model-parallel-size {EP} --expert-tensor-parallel-size {ETP}
        --micro-batch-size {MICRO_BATCH_SIZE} --global-batch-size {GLOBAL_BATCH_SIZE}
        --train-iters {iterations} --eval-iters 0 --eval-interval {iterations} --seed 1234
        --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters {iterations // 20}
        --clip-grad 1.0
        --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --split 100,0,0
        --distributed-timeout-minutes 2 --log-interval 1
    """.split()
    data = ["--data-path", str(data_prefix), "--data-cache-path", str(data_prefix.parent / "cache")]
    return [*arguments, *data, *CPU_RANKS_ARGUMENTS]


def dispatcher_arguments(name: str) -> list[str]:
    """The only difference between the two trainings."""
    chosen = ["--moe-token-dispatcher-type", name]
    if name == "monta":
        # torchrun sees one machine; this says where the nodes of the layout end.
        chosen += ["--moe-monta-ranks-per-node", str(RANKS_PER_NODE)]
        # Chosen by name, because for so small a model the planner would pick plain alltoall.
        chosen += ["--moe-monta-chain", CHAIN]
    return chosen


def train(name: str, dispatcher: Sequence[str], arguments: Sequence[str], iterations: int) -> Run:
    """Train with one dispatcher under torchrun and read the record.

    Args:
        name: name of the log and the record.
        dispatcher: the arguments that choose it.
        arguments: all others; of one that is given twice, the last one counts.
        iterations: iterations of the training, for the progress bar.

    Raises:
        QuickstartError: the training failed; the text holds the ranks' errors.
    """
    log, record = FOLDER / f"{name}.log", FOLDER / f"{name}.jsonl"
    record.write_text("")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(NODES * RANKS_PER_NODE)),
        *(str(Path(__file__).with_name("train.py")), "--record", str(record)),
        *dispatcher,
        *arguments,
    ]
    start = time.monotonic()
    with log.open("w") as output, progress(name, iterations) as show:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _follow(process, record, show)
        finally:
            # Also ends the ranks if this process is interrupted.
            process.terminate()
            process.wait()
    entries = read_record(record)
    if process.returncode != 0:
        raise QuickstartError(f"training with {name} failed\n{error_lines(log)}\nlog: {log}")
    return Run(
        losses=[entry["loss"] for entry in entries if "loss" in entry],
        dispatch=entries[-1],
        seconds=time.monotonic() - start,
        routing=[entry["routing"] for entry in entries if "routing" in entry],
    )


def _follow(process: subprocess.Popen[bytes], record: Path, show: ShowProgress) -> None:
    finished = 0
    running = True
    while running:
        # Polled before the record is read, so that its last lines are not missed.
        running = process.poll() is None
        losses = [entry["loss"] for entry in read_record(record) if "loss" in entry]
        if len(losses) > finished:
            finished = len(losses)
            show(finished, losses[-1])
        if running:
            time.sleep(0.2)


def read_record(record: Path) -> list[dict[str, Any]]:
    """What train.py has written so far."""
    # A line that is still being written has no end yet.
    lines = record.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def error_lines(log: Path) -> str:
    """Each rank's error with the line that raised it; the log's end where there is none."""
    lines = log.read_text(errors="replace").splitlines()
    # torchrun's own error says only that a rank failed.
    pattern = re.compile(
        r"(?P<rank>(\[rank\d+\]: )?)(?!torch\.distributed\.elastic)"
        r"([\w.]+(Error|Exception)\b|monta: error)"
    )
    errors = []
    raised_at: dict[str, str] = {}
    for line in lines:
        prefix, frame, _ = line.partition("  File ")
        if frame:
            raised_at[prefix] = line
        elif match := pattern.match(line):
            errors += [*filter(None, [raised_at.get(match["rank"])]), line]
    return "\n".join(errors or lines[-15:])


def failures(monta: Run, alltoall: Run, iterations: int) -> list[str]:
    """The results that are not as they have to be, one line each."""
    failed = []
    for name, run, expected in (
        ("monta", monta, MONTA_DISPATCHER),
        ("alltoall", alltoall, STOCK_DISPATCHER),
    ):
        if run.dispatch["dispatcher"] != [expected]:
            ran = " and ".join(run.dispatch["dispatcher"]) or "no dispatcher"
            failed.append(f"{name}: {ran} ran, must be {expected}")
        if len(run.losses) != iterations:
            failed.append(f"{name}: {len(run.losses)} losses recorded, must be {iterations}")
    if len(monta.dispatch["chain"]) != 1 or len(monta.dispatch["num_chunks"]) != 1:
        failed.append(f"monta: layers or ranks differ: {monta.dispatch}")
    if monta.dispatch["bytes"]["inter"] == 0:
        failed.append("monta: no bytes moved between the nodes")
    for iteration, (mine, stock) in enumerate(zip(monta.losses, alltoall.losses, strict=False), 1):
        if mine != stock:
            failed.append(f"losses differ from iteration {iteration} on: {mine} and {stock}")
            break
    ratio = _last_over_first(monta.losses)
    if not ratio <= LARGEST_LAST_OVER_FIRST:
        failed.append(
            f"the model does not learn: mean of the last {NUM_LAST_LOSSES} losses is {ratio:.3f} "
            f"of the first, must be at most {LARGEST_LAST_OVER_FIRST}"
        )
    return failed


def summarise(monta: Run, alltoall: Run, failed: list[str]) -> dict[str, Any]:
    """The content of summary.json."""
    pairs = list(zip(monta.losses, alltoall.losses, strict=False))
    return {
        "passed": not failed,
        "failures": failed,
        "iterations": len(monta.losses),
        "loss_first": monta.losses[0],
        "loss_last": monta.losses[-1],
        "loss_mean_last_10": _mean_of_last(monta.losses),
        "loss_last_over_first": _last_over_first(monta.losses),
        "max_rel_loss_diff": max(abs(mine - stock) / abs(stock) for mine, stock in pairs),
        "dispatcher": monta.dispatch["dispatcher"][0],
        "chain": monta.dispatch["chain"][0],
        "num_chunks": monta.dispatch["num_chunks"][0],
        "bytes": monta.dispatch["bytes"],
        "layout": {
            "world_size": NODES * RANKS_PER_NODE,
            "nodes": NODES,
            "ranks_per_node": RANKS_PER_NODE,
            "tp": TP,
            "ep": EP,
            "etp": ETP,
        },
        "seconds": {"monta": round(monta.seconds, 1), "alltoall": round(alltoall.seconds, 1)},
        "versions": {
            "python": sys.version.split()[0],
            **{name: version(name) for name in ("torch", "megatron-core", "monta-megatron")},
        },
        "losses": {"monta": monta.losses, "alltoall": alltoall.losses},
    }


def _mean_of_last(losses: Sequence[float]) -> float:
    last = losses[-NUM_LAST_LOSSES:]
    return sum(last) / len(last)


def _last_over_first(losses: Sequence[float]) -> float:
    return _mean_of_last(losses) / losses[0]


def closing_text(summary: dict[str, Any]) -> str:
    """The table of losses, and what it was measured on."""
    num_bytes = summary["bytes"]
    return f"""
{loss_table(summary["losses"]["monta"], summary["losses"]["alltoall"])}

layout      {NODES} nodes x {RANKS_PER_NODE} CPU ranks: TP {TP}, EP {EP}, ETP {ETP}, fp32
chain       {summary["chain"]}, {summary["num_chunks"]} chunks ({summary["dispatcher"]})
bytes sent  {num_bytes["inter"]:,} between nodes, {num_bytes["intra"]:,} inside
loss        largest relative difference {summary["max_rel_loss_diff"]:g}; mean of the last \
{NUM_LAST_LOSSES} is {summary["loss_last_over_first"]:.2f} of the first
time        {summary["seconds"]["monta"]} s with monta, {summary["seconds"]["alltoall"]} s with \
alltoall
summary     {(FOLDER / "summary.json").relative_to(ROOT)}
"""


def quickstart(texts: Sequence[bytes], iterations: int) -> None:
    """Prepare, train twice, compare.

    Raises:
        QuickstartError: a training failed, or a check did.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    summary_path = FOLDER / "summary.json"
    summary_path.unlink(missing_ok=True)
    data_prefix = prepare(texts, FOLDER / "data")
    print(f"text: {len(texts)} documents, {sum(map(len, texts)):,} bytes", flush=True)
    arguments = megatron_arguments(data_prefix, iterations)
    monta, alltoall = (
        train(name, dispatcher_arguments(name), arguments, iterations)
        for name in ("monta", "alltoall")
    )

    failed = failures(monta, alltoall, iterations)
    summary = summarise(monta, alltoall, failed)
    summary_path.write_text(json.dumps(summary, indent=2) + "\n")
    print(closing_text(summary), flush=True)
    if failed:
        raise QuickstartError("\n".join(failed))


def main() -> int:
    parser = argparse.ArgumentParser(prog="quickstart.sh", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="UTF-8 text to train on (default: the documentation that Python itself contains)",
    )
    parser.add_argument("--iterations", type=int, default=40, help="of each training (default: 40)")
    options = parser.parse_args()
    if options.iterations < 2 * NUM_LAST_LOSSES:
        parser.error(f"--iterations: got {options.iterations}, must be >= {2 * NUM_LAST_LOSSES}")
    if os.environ.get("MONTA_CPU_RANKS") != "1":
        parser.error("MONTA_CPU_RANKS: must be 1; start scripts/quickstart.sh, which sets it")
    # A terminated quickstart ends its ranks, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        quickstart(read_texts(options.text), options.iterations)
    except ValueError as error:
        parser.error(str(error))
    except QuickstartError as error:
        print(f"quickstart: FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
