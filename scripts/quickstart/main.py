"""The quickstart: train one small GPT-MoE with `monta` and with `alltoall`, and compare.

Four CPU ranks are two nodes of two GPUs. Where a network can be emulated it joins the nodes at a
slow rate, so that the iteration times show what the exchange gains; elsewhere the losses alone are
compared. Both trainings are Megatron's own, on the same text from the same seed.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from one_run import FOLDER, ROOT, QuickstartError, Run, train
from prepare_text import prepare, read_texts
from report import largest_difference, loss_table
from trainings import (
    NODES,
    ON_ONE_MACHINE,
    OVER_A_NETWORK,
    RANKS_PER_NODE,
    Training,
    dispatcher_arguments,
    megatron_arguments,
)

from monta_megatron.common.presets import commit, machine, versions
from monta_megatron.common.units import size_text
from monta_megatron.emulation import emulator
from monta_megatron.tools.compare import Compared, compare, interleaved

INTER_MBIT = 100.0
MIN_ITERATIONS = 8
# The mean of the last quarter of the losses has to be at most this fraction of the first loss.
LARGEST_LAST_OVER_FIRST = 0.75

DISPATCHERS = {"monta": "MontaTokenDispatcher", "alltoall": "MoEAlltoAllTokenDispatcher"}


def why_no_network() -> str | None:
    """What keeps this machine from emulating a network, and how to get it; None if nothing does."""
    try:
        emulator.unshare_command()
    except ValueError as error:
        return str(error)
    return None


def failures(runs: Sequence[Run], training: Training, iterations: int) -> list[str]:
    """The results that are not as they have to be, one line each."""
    failed = []
    for run in runs:
        expected = DISPATCHERS[run.dispatcher]
        if run.dispatch["dispatcher"] != [expected]:
            ran = " and ".join(run.dispatch["dispatcher"]) or "no dispatcher"
            failed.append(f"{run.dispatcher}: {ran} ran, must be {expected}")
        if len(run.losses) != iterations:
            failed.append(
                f"{run.dispatcher}: {len(run.losses)} losses recorded, must be {iterations}"
            )
    monta = first(runs, "monta")
    if len(monta.dispatch["chain"]) != 1 or len(monta.dispatch["num_chunks"]) != 1:
        failed.append(f"monta: layers or ranks differ: {monta.dispatch}")
    if monta.dispatch["bytes"]["inter"] == 0:
        failed.append("monta: no bytes moved between the nodes")
    difference = max_loss_difference(runs)
    if not difference <= training.largest_difference:
        failed.append(
            f"losses differ by a relative {difference:.2g}, must be at most "
            f"{training.largest_difference:g}"
        )
    ratio = last_over_first(monta.losses)
    if not ratio <= LARGEST_LAST_OVER_FIRST:
        failed.append(
            f"the model does not learn: the last losses are {ratio:.3f} of the first, must be at "
            f"most {LARGEST_LAST_OVER_FIRST}"
        )
    return failed


def first(runs: Sequence[Run], dispatcher: str) -> Run:
    """The first training with a dispatcher."""
    return next(run for run in runs if run.dispatcher == dispatcher)


def max_loss_difference(runs: Sequence[Run]) -> float:
    """Of all losses, from those of the first training with stock's dispatcher."""
    stock = first(runs, "alltoall").losses
    return max(largest_difference(run.losses, stock) for run in runs)


def last_over_first(losses: Sequence[float]) -> float:
    """The mean of the last quarter of the losses over the first one."""
    last = losses[-max(1, len(losses) // 4) :]
    return sum(last) / len(last) / losses[0]


def summarise(
    runs: Sequence[Run], training: Training, inter_mbit: float | None, failed: list[str]
) -> dict[str, Any]:
    """The content of summary.json; times are compared only where there is a network."""
    monta, alltoall = first(runs, "monta"), first(runs, "alltoall")
    logs = {name: [run.log for run in runs if run.dispatcher == name] for name in DISPATCHERS}
    return {
        "passed": not failed,
        "failures": failed,
        "iterations": len(monta.losses),
        "loss_first": monta.losses[0],
        "loss_last": monta.losses[-1],
        "loss_last_over_first": last_over_first(monta.losses),
        "max_rel_loss_diff": max_loss_difference(runs),
        "dispatcher": monta.dispatch["dispatcher"][0],
        "chain": monta.dispatch["chain"][0],
        "num_chunks": monta.dispatch["num_chunks"][0],
        "bytes": monta.dispatch["bytes"],
        "inter_mbit": inter_mbit,
        "network_bytes": None
        if inter_mbit is None
        else {run.dispatcher: run.dispatch["network_bytes"] for run in (monta, alltoall)},
        "iteration": None
        if inter_mbit is None
        else iteration_times(*(compare(name, logs["alltoall"], logs[name]) for name in logs)),
        "model": training.model,
        "sizes": " ".join(training.sizes.split()),
        "layout": {
            "world_size": NODES * RANKS_PER_NODE,
            "nodes": NODES,
            "ranks_per_node": RANKS_PER_NODE,
        },
        "seconds": {run.dispatcher: round(run.seconds, 1) for run in (monta, alltoall)},
        "versions": versions(),
        "machine": machine(),
        "commit": commit(),
        "losses": {"monta": monta.losses, "alltoall": alltoall.losses},
        "runs": [
            {"dispatcher": run.dispatcher, "times_ms": list(run.log.times_ms.values())}
            for run in runs
        ],
    }


def iteration_times(monta: Compared, alltoall: Compared) -> dict[str, Any]:
    """Medians, and alltoall's over monta's with its 95% interval over the pairs."""
    return {
        "monta_ms": monta.iteration_ms,
        "alltoall_ms": alltoall.iteration_ms,
        "ratio": monta.ratio,
        "interval": monta.interval,
    }


def closing_text(summary: dict[str, Any]) -> str:
    """The table of losses, and what it was measured on."""
    difference = summary["max_rel_loss_diff"]
    chunks = f"{summary['num_chunks']} chunk" + "s" * (summary["num_chunks"] != 1)
    lines = [
        loss_table(summary["losses"]["monta"], summary["losses"]["alltoall"]),
        "",
        f"model       {summary['model']}",
        f"chain       {summary['chain']}, {chunks}",
    ]
    if summary["iteration"] is None:
        sent = summary["bytes"]
        lines += [
            f"nodes       {NODES} x {RANKS_PER_NODE} CPU ranks, no network between them",
            f"bytes sent  {sent['inter']:,} between nodes, {sent['intra']:,} inside",
        ]
    else:
        times, sent = summary["iteration"], summary["network_bytes"]
        lines += [
            f"nodes       {NODES} x {RANKS_PER_NODE} CPU ranks, joined at "
            f"{summary['inter_mbit']:g} Mbit/s (emulated)",
            f"bytes sent  between nodes {size_text(sent['monta'])} with monta, "
            f"{size_text(sent['alltoall'])} with alltoall",
            f"iteration   {times['monta_ms']:,.0f} ms with monta, {times['alltoall_ms']:,.0f} ms "
            f"with alltoall: {times['ratio']:.2f} times as fast",
        ]
    lines += [
        f"loss        largest relative difference {difference:.2g}; "
        f"{summary['loss_last_over_first'] - 1:+.0%} from first to last",
        f"summary     {(FOLDER / 'summary.json').relative_to(ROOT)}",
    ]
    return "\n" + "\n".join(lines)


def quickstart(
    texts: Sequence[bytes], iterations: int | None, pairs: int, inter_mbit: float | None
) -> None:
    """Prepare, train with each dispatcher in turn, compare.

    Raises:
        QuickstartError: a training failed, or a check did.
    """
    training = ON_ONE_MACHINE if inter_mbit is None else OVER_A_NETWORK
    iterations = iterations or training.iterations
    FOLDER.mkdir(parents=True, exist_ok=True)
    summary_path = FOLDER / "summary.json"
    summary_path.unlink(missing_ok=True)
    data_prefix = prepare(texts, FOLDER / "data")
    print(f"text: {len(texts)} documents, {sum(map(len, texts)):,} bytes", flush=True)
    arguments = megatron_arguments(training, data_prefix, iterations)
    runs = [
        train(
            name if pair == 0 else f"{name}-{pair + 1}",
            dispatcher_arguments(training, name),
            arguments,
            iterations,
            inter_mbit,
        )
        for pair, name in interleaved(tuple(DISPATCHERS), pairs)
    ]
    failed = failures(runs, training, iterations)
    summary = summarise(runs, training, inter_mbit, failed)
    summary_path.write_text(json.dumps(summary, indent=2) + "\n")
    print(closing_text(summary), flush=True)
    if failed:
        raise QuickstartError("\n".join(failed))


def read_arguments() -> argparse.Namespace:
    """The command line, checked; a mistake ends the program with status 2."""
    parser = argparse.ArgumentParser(prog="quickstart.sh", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="UTF-8 text to train on (default: the documentation that Python itself contains)",
    )
    parser.add_argument(
        "--iterations",
        type=int,
        help=f"of each training (default: {OVER_A_NETWORK.iterations}, "
        f"{ON_ONE_MACHINE.iterations} without a network)",
    )
    parser.add_argument("--pairs", type=int, default=1, help="trainings of each (default: 1)")
    parser.add_argument(
        "--inter-mbit",
        type=float,
        default=INTER_MBIT,
        metavar="R",
        help="rate between the emulated nodes, in 1e6 bits per second (default: %(default)g)",
    )
    parser.add_argument(
        "--no-network", action="store_true", help="compare losses only, as where none is emulated"
    )
    options = parser.parse_args()
    if options.iterations is not None and options.iterations < MIN_ITERATIONS:
        parser.error(f"--iterations: got {options.iterations}, must be >= {MIN_ITERATIONS}")
    if options.pairs < 1:
        parser.error(f"--pairs: got {options.pairs}, must be >= 1")
    if not options.inter_mbit >= 1:
        parser.error(f"--inter-mbit: got {options.inter_mbit:g}, must be >= 1")
    if os.environ.get("MONTA_CPU_RANKS") != "1":
        parser.error("MONTA_CPU_RANKS: must be 1; start scripts/quickstart.sh, which sets it")
    try:
        options.text = read_texts(options.text)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> int:
    options = read_arguments()
    # A terminated quickstart ends its ranks, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    reason = "--no-network" if options.no_network else why_no_network()
    inter_mbit = None if reason else options.inter_mbit
    if reason:
        print(f"no network is emulated, so losses are compared and not times: {reason}", flush=True)
    try:
        quickstart(options.text, options.iterations, options.pairs, inter_mbit)
    except QuickstartError as error:
        print(f"quickstart: FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
