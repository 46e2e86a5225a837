r"""Dispatch forward with tokens in their own dtype and in eight bits, in one interleaved run.

What is timed are Megatron's phases up to the experts: counts, their exchange, what is quantized and
what moves. Stock's `alltoall` runs beside. Takes the flags of `monta bench`, whose rows come first,
and like it one process per rank:

    monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 100 -- \
        benchmarks/wire.py --experts 64 --top-k 8 --hidden 1024 --tokens 512 --dtype bfloat16 \
        --chains hierarchical_alltoall --num-chunks 4 --phase forward
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sweep import Study, start

from monta_megatron.chains.program import DISPATCH
from monta_megatron.common.tables import table
from monta_megatron.tools.bench.candidates import Candidate, build_candidates, build_dispatcher
from monta_megatron.tools.bench.measure import time_interleaved
from monta_megatron.tools.bench.point import Bench
from monta_megatron.tools.bench.report import Row


def finish(timed: Bench, rows: list[Row]) -> dict[str, Any]:
    """Medians of dispatch forward, by chain and by what travels."""
    settings, batches = timed.task.settings, timed.batches
    timed.task.progress.phase(f"{timed.task.name}dispatch in eight bits", 0)
    candidates, _ = build_candidates(settings, None, timed.layout, batches)
    named = [(f"{each.kind} {each.key[0]} x{each.key[1]}", each) for each in candidates]
    for each in candidates:
        if each.kind == "monta":
            chain, num_chunks = each.key
            dispatcher = build_dispatcher(settings, None, chain, num_chunks, wire_dtype="fp8")
            name = f"{each.kind} {chain} x{num_chunks}, fp8"
            named.append(
                (
                    name,
                    Candidate(
                        kind="monta", requested=chain, dispatcher=dispatcher, batches=batches
                    ),
                )
            )
    timings = time_interleaved(
        [_dispatch(each) for _, each in named], settings.repeats, settings.warmup, lambda: 0
    )
    medians_ms: list[float] = np.median(timings.times_ms, axis=0).tolist()
    return {
        "wire": [
            {"dispatcher": name, "median_ms": median_ms, "bytes": _bytes_of(each)}
            for (name, each), median_ms in zip(named, medians_ms, strict=True)
        ]
    }


def wire_text(reports: Sequence[Mapping[str, Any]]) -> str:
    """One line per dispatcher."""
    return "\n\n".join(
        table(
            ["dispatch forward", ">ms", ">sent by rank 0, all runs"],
            [
                [each["dispatcher"], f"{each['median_ms']:.1f}", each["bytes"] or ""]
                for each in report["wire"]
            ],
            title="tokens in their own dtype, and in eight bits",
        )
        for report in reports
    )


def _dispatch(candidate: Candidate) -> Callable[[int], None]:
    def run(repeat: int) -> None:
        dispatcher, batch = candidate.dispatcher, candidate.batch()
        with torch.no_grad():
            rows, probs = dispatcher.dispatch_preprocess(
                batch.hidden, batch.routing_map, batch.probs
            )
            dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, probs))

    return run


def _bytes_of(candidate: Candidate) -> int:
    """Payload that this rank has sent."""
    if candidate.kind == "megatron":
        return 0
    return int(sum(candidate.dispatcher.monitor.bytes_sent.values()))


STUDY = Study(name=f"wire, {DISPATCH.name}", build=build_candidates, finish=finish, text=wire_text)

if __name__ == "__main__":
    sys.exit(start(STUDY, __doc__))
