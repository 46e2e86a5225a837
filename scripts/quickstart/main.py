"""The quickstart: train one small GPT-MoE with `monta` and with `alltoall`, and compare.

Four CPU ranks are two nodes of two GPUs. Where a network can be emulated it joins the nodes at a
slow rate, so that the iteration times show what the exchange gains; elsewhere the losses alone are
compared. Both trainings are Megatron's own, on the same text from the same seed.
"""

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from one_run import FOLDER, QuickstartError, Run, largest_difference, train
from trainings import (
    NODES,
    ON_ONE_MACHINE,
    OVER_A_NETWORK,
    RANKS_PER_NODE,
    Training,
    dispatcher_arguments,
)

from monta_megatron.cli.parser import Parser
from monta_megatron.common.busy import busy_text, cores_in_use
from monta_megatron.common.errors import UserError
from monta_megatron.common.files import commit, machine, versions
from monta_megatron.common.rules import positive, whole
from monta_megatron.common.text import size_text, table
from monta_megatron.emulation import emulator
from monta_megatron.tools.compare import compare, order_of

INTER_MBIT = 100.0
MIN_ITERATIONS = 8
NUM_TABLE_ROWS = 10
# The mean of the last quarter of the losses has to be at most this fraction of the first loss.
LARGEST_LAST_OVER_FIRST = 0.75

DISPATCHERS = {"monta": "MontaTokenDispatcher", "alltoall": "MoEAlltoAllTokenDispatcher"}

Runs = Mapping[str, Sequence[Run]]


def summarise(runs: Runs, training: Training, inter_mbit: float | None) -> dict[str, Any]:
    """The content of summary.json; times are compared only where there is a network."""
    monta, alltoall = runs["monta"][0], runs["alltoall"][0]
    losses = list(monta.losses.values())
    all_losses = [run.losses for name in runs for run in runs[name]]
    summary = {
        "iterations": len(losses),
        "loss_last_over_first": fmean(losses[-max(1, len(losses) // 4) :]) / losses[0],
        "max_rel_loss_diff": largest_difference(all_losses, alltoall.losses),
        "chain": monta.log.chain,
        "bytes": monta.dispatch["bytes"],
        "network_bytes": {name: runs[name][0].dispatch["bytes"].get("network") for name in runs},
        "inter_mbit": inter_mbit,
        "iteration": None,
        "model": training.model,
        "versions": versions(),
        "machine": machine(),
        "commit": commit(),
        "losses": {name: runs[name][0].losses for name in runs},
    }
    if inter_mbit is not None:
        logs = {name: [run.log for run in runs[name]] for name in runs}
        summary["iteration"] = {
            name: asdict(compare(name, logs["alltoall"], logs[name])) for name in runs
        }
    return summary


def failures(runs: Runs, training: Training, summary: Mapping[str, Any]) -> list[str]:
    """The results that are not as they have to be, one line each."""
    failed = [
        f"{name}: {' and '.join(run.dispatch['dispatcher'])} ran, must be {DISPATCHERS[name]}"
        for name in runs
        for run in runs[name]
        if run.dispatch["dispatcher"] != [DISPATCHERS[name]]
    ]
    difference, most = summary["max_rel_loss_diff"], training.largest_difference
    if not difference <= most:
        failed.append(f"losses differ by a relative {difference:.2g}, must be at most {most:g}")
    ratio = summary["loss_last_over_first"]
    if not ratio <= LARGEST_LAST_OVER_FIRST:
        failed.append(
            f"the model does not learn: the last losses are {ratio:.3f} of the first, must be at "
            f"most {LARGEST_LAST_OVER_FIRST}"
        )
    return failed


def closing_text(summary: Mapping[str, Any]) -> str:
    """The table of losses, and what it was measured on."""
    losses, sent, times = summary["losses"], summary["network_bytes"], summary["iteration"]
    step = max(1, summary["iterations"] // NUM_TABLE_ROWS)
    # Loss minus loss, not rounded: 0 is printed only where the two are the same number.
    rows = [
        (iteration, f"{monta:.6f}", f"{alltoall:.6f}", f"{monta - alltoall:.3g}")
        for iteration, monta in losses["monta"].items()
        for alltoall in [losses["alltoall"][iteration]]
        if iteration == 1 or iteration % step == 0
    ]
    if times is None:
        network = "no network between them"
        num_bytes = f"{size_text(summary['bytes']['inter'])} with monta"
    else:
        network = f"joined at {summary['inter_mbit']:g} Mbit/s (emulated)"
        num_bytes = ", ".join(f"{size_text(sent[name])} with {name}" for name in sent)
    lines = [
        table([">iteration", ">monta", ">alltoall", ">difference"], rows),
        "",
        f"model       {summary['model']}",
        f"chain       {summary['chain']}",
        f"nodes       {NODES} x {RANKS_PER_NODE} CPU ranks, {network}",
        f"bytes sent  between nodes {num_bytes}",
    ]
    if times is not None:
        lines += [
            "iteration   "
            + ", ".join(f"{times[name]['iteration_ms']:,.0f} ms with {name}" for name in times)
            + f": {times['monta']['ratio']:.2f} times as fast"
        ]
    lines += [
        f"loss        largest relative difference {summary['max_rel_loss_diff']:.2g}; "
        f"{summary['loss_last_over_first'] - 1:+.0%} from first to last",
        "summary     runs/quickstart/summary.json",
    ]
    return "\n" + "\n".join(lines)


def quickstart(iterations: int | None, pairs: int, inter_mbit: float | None) -> None:
    """Train with each dispatcher in turn, compare.

    Raises:
        QuickstartError: a training failed, or a check did.
    """
    training = ON_ONE_MACHINE if inter_mbit is None else OVER_A_NETWORK
    iterations = iterations or training.iterations
    summary_path = FOLDER / "summary.json"
    summary_path.unlink(missing_ok=True)
    runs: dict[str, list[Run]] = {name: [] for name in DISPATCHERS}
    for pair in range(pairs):
        for name in order_of(pair, tuple(DISPATCHERS)):
            arguments = dispatcher_arguments(training, name)
            run = train(f"{name}-{pair + 1}", training, arguments, iterations, inter_mbit)
            runs[name].append(run)
    summary = summarise(runs, training, inter_mbit)
    failed = failures(runs, training, summary)
    summary_path.write_text(json.dumps(summary | {"failures": failed}, indent=2) + "\n")
    if failed:
        raise QuickstartError("\n".join(failed))
    print(closing_text(summary), flush=True)


def read_arguments() -> argparse.Namespace:
    """The command line, checked; a mistake ends the program with status 2."""
    parser = Parser(prog="quickstart.sh", description=__doc__)
    parser.add_argument(
        "--iterations",
        type=whole(MIN_ITERATIONS),
        help=f"of each training (default: {OVER_A_NETWORK.iterations}, "
        f"{ON_ONE_MACHINE.iterations} without a network)",
    )
    parser.add_argument("--pairs", type=whole(1), default=1, help="trainings of each (default: 1)")
    parser.add_argument(
        "--inter-mbit",
        type=positive,
        default=INTER_MBIT,
        metavar="R",
        help="rate between the emulated nodes, in 1e6 bits per second (default: %(default)g)",
    )
    parser.add_argument(
        "--no-network", action="store_true", help="compare losses only, as where none is emulated"
    )
    return parser.parse_args()


def why_no_network() -> str | None:
    """Why this machine cannot emulate a network, and how to get it; None if it can."""
    try:
        emulator.unshare_command()
    except UserError as error:
        return str(error)
    return None


def main() -> int:
    options = read_arguments()
    # A terminated quickstart ends its ranks, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if busy := busy_text(cores_in_use(), NODES * RANKS_PER_NODE):
        print(f"{busy}; times will be longer, and less certain", flush=True)
    reason = "--no-network" if options.no_network else why_no_network()
    if reason:
        print(f"no network is emulated, so losses are compared and not times: {reason}", flush=True)
    try:
        inter_mbit = None if reason else options.inter_mbit
        quickstart(options.iterations, options.pairs, inter_mbit)
    except QuickstartError as error:
        print(f"quickstart: FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
