r"""A link of an emulated cluster that becomes four times slower: when it is noticed, and as what.

First nothing changes for 2,000 iterations of one exchange, then the last rank of each node sends at
a quarter of the rate. One iteration in 50 is watched. Takes the flags of `monta bench`, whose rows
come first, with one chain, and like it one process per rank:

    monta emulate --nodes 2 --ranks-per-node 2 --nic-per rank --inter-mbit 400 -- \
        benchmarks/slower_link.py --experts 8 --top-k 4 --hidden 512 --tokens 256 \
        --chains hierarchical_alltoall --num-chunks 2
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sweep import Study, start

from monta_megatron.integration.controller import deciding_controllers
from monta_megatron.tools.bench.candidates import (
    Candidate,
    build_candidates,
    build_dispatcher,
    identity_experts,
    run_candidate,
)
from monta_megatron.tools.bench.point import Bench
from monta_megatron.tools.bench.report import Row

WATCH_STEPS = 50
UNDISTURBED, SLOW = 2000, 2 * WATCH_STEPS
SLOWER = 4


def finish(timed: Bench, rows: list[Row]) -> dict[str, Any]:
    """What was noticed in which iteration, and what watching takes."""
    settings, emulated = timed.task.settings, timed.task.emulated
    if emulated is None or emulated.nic_per != "rank":
        raise ValueError("monta emulate --nic-per rank: missing, must give each rank a NIC")
    timed.task.progress.phase("iterations", UNDISTURBED + SLOW)
    (chain,), (num_chunks,) = settings.chains, settings.num_chunks
    dispatcher = build_dispatcher(settings, None, chain, num_chunks, watch_steps=WATCH_STEPS)
    candidate = Candidate(
        kind="monta", requested=chain, dispatcher=dispatcher, batches=timed.batches
    )
    decisions = [controller.decision for controller in deciding_controllers()]
    (watching,) = (each.watching for each in decisions if each is not None and each.watching)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    changes: list[dict[str, Any]] = []
    ms: dict[bool, list[float]] = {True: [], False: []}
    for iteration in range(UNDISTURBED + SLOW):
        is_last = int(os.environ["LOCAL_RANK"]) == emulated.ranks_per_node - 1
        if iteration == UNDISTURBED and is_last:
            _limit_rate(os.environ["GLOO_SOCKET_IFNAME"], emulated.inter_mbit / SLOWER)
        is_watched, begin_s = watching.is_on, time.perf_counter()
        run_candidate(candidate, identity_experts, backward=True, exchange=iteration)
        optimizer.step()
        if iteration < UNDISTURBED:
            ms[is_watched].append(1e3 * (time.perf_counter() - begin_s))
        if watching.change is not None:
            changes.append({"iteration": iteration + 1, "text": watching.change.text})
        timed.task.progress.step()
    watched_ms, other_ms = float(np.median(ms[True])), float(np.median(ms[False]))
    return {
        "slower_after": UNDISTURBED,
        "changes": changes,
        "watched_ms": watched_ms,
        "other_ms": other_ms,
        "watching_takes": (watched_ms - other_ms) / WATCH_STEPS / other_ms,
    }


def slower_link_text(reports: Sequence[Mapping[str, Any]]) -> str:
    """What was noticed, and what an iteration takes with and without watching."""
    lines = []
    for report in reports:
        lines.append(f"a link is {SLOWER} times slower after iteration {report['slower_after']}")
        lines += [f"noticed in {each['iteration']}: {each['text']}" for each in report["changes"]]
        lines.append(
            f"an iteration takes {report['other_ms']:.1f} ms, a watched one "
            f"{report['watched_ms']:.1f}: {report['watching_takes']:.2%} of all"
        )
    return "\n".join(lines)


def _limit_rate(interface: str, mbit: float) -> None:
    """Limit what leaves through an interface of `monta emulate`, in 1e6 bits per second."""
    limit = f"tbf rate {round(mbit * 1e6)}bit burst 65536 limit 4000000"
    subprocess.run(["tc", "qdisc", "change", "dev", interface, "root", *limit.split()], check=True)


STUDY = Study(name="slower link", build=build_candidates, finish=finish, text=slower_link_text)

if __name__ == "__main__":
    sys.exit(start(STUDY, __doc__))
