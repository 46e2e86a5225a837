r"""The 1F1B schedule on CPU ranks: is the hidden part measured, and does it help `auto` to choose?

A thread communicates in place of the communication stream, and a timer computes. Every chain of
`--chains` in every number of `--num-chunks` runs in that schedule; then `auto`, tuned by the
exposed part that it measures. Takes the flags of `monta bench`, and like it one process per rank;
`--expert-ms` is the emulated computation between two exchanges:

    monta emulate --nodes 2 --ranks-per-node 2 --inter-mbit 400 -- benchmarks/overlap.py \
        --experts 8 --top-k 4 --hidden 512 --tokens 256 --layer --expert-ms 30 --num-chunks 1,2
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from sweep import Study, start

from monta_megatron.integration.dispatcher import MontaTokenDispatcher
from monta_megatron.integration.options import AUTO, SCHEDULE
from monta_megatron.tools.bench.candidates import Batch, build_candidates
from monta_megatron.tools.bench.layer import dispatcher_on, layer_config
from monta_megatron.tools.bench.point import Bench
from monta_megatron.tools.bench.report import Row
from monta_megatron.tools.bench.settings import Settings

MICRO_BATCHES, ROUNDS, TUNE_STEPS, WATCH_STEPS = 4, 9, 30, 3
# Until the tuning has ended, and some watched iterations are known.
SETTLED = TUNE_STEPS + 6 * WATCH_STEPS


class MicroBatch:
    """One micro-batch of an MoE layer, cut into the parts that the schedule runs."""

    def __init__(self, dispatcher: Any, batch: Batch) -> None:
        self._dispatcher, self._batch = dispatcher, batch
        # Of dispatch and combine: [inputs], [outputs].
        self._ends: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def preprocess(self) -> None:
        """Count and permute, on the computing side."""
        hidden, probs = self._batch.hidden, self._batch.probs
        self._rows = self._dispatcher.dispatch_preprocess(hidden, self._batch.routing_map, probs)

    def dispatch(self) -> None:
        """Move rows to their experts."""
        inputs = [each.detach().requires_grad_() for each in self._rows]
        self._ends.append((inputs, list(self._dispatcher.token_dispatch(*inputs))))

    def combine(self) -> None:
        """Bring them back: the experts leave them as they are."""
        rows, probs = (each.detach() for each in self._ends[0][1])
        rows, _, _ = self._dispatcher.dispatch_postprocess(rows, probs)
        rows = self._dispatcher.combine_preprocess(rows).requires_grad_()
        output = self._dispatcher.combine_postprocess(self._dispatcher.token_combine(rows))
        self._ends.append(([rows], [output]))

    def combine_backward(self) -> None:
        """Backward pass of combine."""
        ((_, outputs)) = self._ends[1]
        torch.autograd.backward(outputs, [self._batch.output_gradient])

    def dispatch_backward(self) -> None:
        """Backward pass of dispatch."""
        rows, probs = self._ends[0][1]
        gradient = self._ends[1][0][0].grad
        torch.autograd.backward([rows, probs], [gradient, torch.ones_like(probs)])


class Schedule:
    """Runs iterations of a dispatcher; computation is a timer.

    Attributes:
        wait_s: time for which computation has waited for the exchange.
        busy_s: time of the exchange.
    """

    def __init__(self, dispatcher: Any, batch: Batch, compute_ms: float) -> None:
        self.wait_s = self.busy_s = 0.0
        self._dispatcher, self._batch, self._compute_s = dispatcher, batch, compute_ms / 1e3
        self._communicates = ThreadPoolExecutor(max_workers=1)
        self._optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def iterate(self) -> float:
        """Run an iteration; returns its time in ms."""
        self.wait_s = self.busy_s = 0.0
        begin_s, old = time.perf_counter(), None
        for number in range(MICRO_BATCHES + 1):
            new = None
            if number < MICRO_BATCHES:
                new = MicroBatch(self._dispatcher, self._batch)
            self._one_forward_one_backward(new, old)
            old = new
        self._optimizer.step()
        return 1e3 * (time.perf_counter() - begin_s)

    def _one_forward_one_backward(self, new: MicroBatch | None, old: MicroBatch | None) -> None:
        """In the order of Megatron's TransformerLayerSchedulePlan.run."""
        of_old = self._start(old.combine_backward if old else None)
        self._compute(new)  # attention
        self._wait(of_old)
        if new is not None:
            new.preprocess()
        of_new = self._start(new.dispatch if new else None)
        self._compute(old)  # experts, backward
        self._wait(of_new)
        of_old = self._start(old.dispatch_backward if old else None)
        self._compute(new)  # experts
        of_new = self._start(new.combine if new else None)
        self._wait(of_old)
        self._compute(old)  # attention, backward
        self._wait(of_new)

    def _start(self, exchange: Callable[[], None] | None) -> Future[None] | None:
        return None if exchange is None else self._communicates.submit(self._timed, exchange)

    def _timed(self, exchange: Callable[[], None]) -> None:
        begin_s = time.perf_counter()
        exchange()
        self.busy_s += time.perf_counter() - begin_s

    def _compute(self, micro_batch: MicroBatch | None) -> None:
        if micro_batch is not None:
            time.sleep(self._compute_s)

    def _wait(self, exchange: Future[None] | None) -> None:
        """Wait as a node of the schedule does, which `metrics.time_waits` times."""
        if exchange is None:
            return
        times = self._dispatcher.controller.pass_times
        stream: Any = None
        begin, begin_s = None if times is None else times.start_wait(stream), time.perf_counter()
        exchange.result()
        self.wait_s += time.perf_counter() - begin_s
        if times is not None and begin is not None:
            times.end_wait(stream, begin)


def finish(timed: Bench, rows: list[Row]) -> dict[str, Any]:
    """Iteration times, those of `auto` among them, and the hidden part by both measurements."""
    settings, batch = timed.task.settings, timed.batches[0]
    if settings.expert_ms is None:
        raise ValueError("--expert-ms: missing, must be the emulated computation")
    compute_ms = settings.expert_ms
    ours = dict.fromkeys(each.key for each in timed.candidates if each.kind == "monta")
    schedules = {
        key: Schedule(_dispatcher(settings, timed, *key), batch, compute_ms) for key in ours
    }
    timed.task.progress.phase("1F1B", SETTLED + ROUNDS * (len(schedules) + 1))
    auto = Schedule(
        _dispatcher(settings, timed, AUTO, None, tune_steps=TUNE_STEPS, watch_steps=WATCH_STEPS),
        batch,
        compute_ms,
    )
    measured, by_timer = [], []
    decision = auto._dispatcher.controller.decision
    before = None
    for _ in range(SETTLED):
        auto.iterate()
        timed.task.progress.step()
        by_timer.append(auto.busy_s - auto.wait_s)
        latest = decision.watching.latest
        if latest is not None and latest is not before:
            before = latest
            measured.append(
                (latest.hidden_us * MICRO_BATCHES / 1e3, 1e3 * by_timer[latest.iteration])
            )
    chosen = auto._dispatcher.chain.name, auto._dispatcher.num_chunks
    ms: dict[tuple[str, int], list[float]] = {key: [] for key in [*schedules, (AUTO, 0)]}
    for _ in range(ROUNDS):
        for key, schedule in {**schedules, (AUTO, 0): auto}.items():
            ms[key].append(schedule.iterate())
            timed.task.progress.step()
    medians = {key: float(np.median(each)) for key, each in ms.items()}
    auto_ms = medians.pop((AUTO, 0))
    return {
        "overlap": {
            "iteration_ms": [[*key, each] for key, each in medians.items()],
            "chosen": list(chosen),
            "auto_ms": auto_ms,
            "regret": medians.get(chosen, auto_ms) / min(medians.values()),
            "hidden_ms": measured,
        }
    }


def _dispatcher(
    settings: Settings, timed: Bench, chain: str, num_chunks: int | None, **options: Any
) -> Any:
    """A dispatcher in a configuration whose exchange another micro-batch hides."""
    config = layer_config(settings)
    setattr(config, SCHEDULE, True)
    options |= {
        "chain": chain,
        "num_chunks": num_chunks,
        "ranks_per_node": settings.ranks_per_node,
        "cluster": timed.task.cluster if chain == AUTO else None,
        "check": 0,
    }
    for name, value in options.items():
        setattr(config, f"moe_monta_{name}", value)
    return dispatcher_on(MontaTokenDispatcher, settings, config, get_default_pg_collection())


def overlap_text(reports: Sequence[Mapping[str, Any]]) -> str:
    """Iteration times, the choice of `auto`, and the hidden part by both measurements."""
    lines = []
    for report in reports:
        overlap = report["overlap"]
        lines += [
            f"{chain} in {num_chunks}: {ms:,.1f} ms an iteration"
            for chain, num_chunks, ms in sorted(overlap["iteration_ms"], key=lambda row: row[2])
        ]
        chain, num_chunks = overlap["chosen"]
        lines.append(f"auto: {chain} in {num_chunks}, {overlap['regret']:.2f}x the fastest")
        measured, timer = np.median(overlap["hidden_ms"], axis=0)
        lines.append(
            f"hidden {measured:,.1f} ms by auto, {timer:,.1f} ms by the timer: "
            f"{measured / timer - 1:+.0%}, medians of {len(overlap['hidden_ms'])} iterations"
        )
    return "\n".join(lines)


STUDY = Study(name="overlap", build=build_candidates, finish=finish, text=overlap_text)

if __name__ == "__main__":
    sys.exit(start(STUDY, __doc__))
