"""The iteration of a training's log: predicted by part beside measured, and changes to it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from monta_megatron.common.tables import WIDTH, table
from monta_megatron.common.units import counted, gb_text
from monta_megatron.planner.assumptions import (
    CPU_RANKS,
    Assumptions,
    assumptions_of,
    gpu_names,
    gpu_of,
)
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster, nearest_preset
from monta_megatron.planner.flex import BACKENDS
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.select import select_chain
from monta_megatron.tools.estimate.estimate import with_1f1b_overlap
from monta_megatron.tools.estimate.exchange import chosen_time, workload_of
from monta_megatron.tools.estimate.iteration import (
    BUBBLE,
    EXCHANGE,
    HIDDEN,
    HOST,
    Iteration,
    estimate_iteration,
)
from monta_megatron.tools.estimate.layers import (
    Architecture,
    TrainingSettings,
    architecture_of,
    settings_of,
)
from monta_megatron.tools.launch.arguments import PARALLEL_ARGUMENTS, SIZE, Arguments
from monta_megatron.tools.run_doctor.figures import wrapped
from monta_megatron.tools.run_doctor.training_log import TrainingRecord

# A change that saves less is not named; so many are.
LEAST_SAVED = 0.01
MOST_CHANGES = MOST_CAUSES = 3
LEAST_SHOWN_MS = 0.5
# Larger micro-batches that are tried, and the share of the best one's saving that is enough.
LARGER, NEARLY = (2, 4, 8), 0.9
UNEXPLAINED = "not explained"
# More than this of the measured time is a cause of its own.
MUCH_UNEXPLAINED = 0.15
NOT_MODELLED = {
    "experimental-attention-variant": "linear or sparse attention",
    "hybrid-layer-pattern": "a hybrid model's layers",
    "hybrid-override-pattern": "a hybrid model's layers",
    "vision-pretraining": "a vision tower",
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """Another setting, and the predicted iteration with it.

    Attributes:
        name: of the change.
        flags: to type.
        saved: share of the measured iteration.
        note: a condition; "" for none.
    """

    name: str
    flags: str
    saved: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class IterationReport:
    """A log's iteration, explained.

    Attributes:
        record: the log.
        cluster: where it ran.
        is_guessed: whether the cluster was guessed from the log.
        settings: how it was trained.
        predicted: the iteration as it ran.
        causes: (cause, its time in ms, the line that speaks for it), the longest first.
        changes: those that save most first.
        monta_saved: share that this dispatcher saves, predicted; None where stock's alltoall did
            not run.
        notes: what is not modelled, or not known.
        watched_exchange_ms: the exchange as it was watched; None where it was not.
    """

    record: TrainingRecord
    cluster: Cluster
    is_guessed: bool
    settings: TrainingSettings
    predicted: Iteration
    causes: tuple[tuple[str, float, str], ...]
    changes: tuple[Change, ...]
    monta_saved: float | None
    notes: tuple[str, ...]
    watched_exchange_ms: float | None = None

    @property
    def unexplained_ms(self) -> float:
        """Measured less predicted."""
        return self.record.iteration_ms - self.predicted.total_ms

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        measured = self.record.iteration_ms
        return {
            "log": self.record.file,
            "cluster": self.cluster.name,
            "cluster_is_guessed": self.is_guessed,
            "measured_ms": measured,
            "iterations": len(self.record.times_ms),
            "tflops_per_gpu": self.record.tflops_per_gpu,
            "skipped": self.record.num_skipped,
            "predicted_ms": self.predicted.total_ms,
            "parts_ms": {**self.predicted.parts_ms, UNEXPLAINED: self.unexplained_ms},
            "causes": [{"cause": cause, "ms": ms, "line": line} for cause, ms, line in self.causes],
            "changes": [
                {
                    "change": change.name,
                    "flags": change.flags,
                    "saves_pct": 100 * change.saved,
                    "saves_ms": change.saved * measured,
                    "note": change.note,
                }
                for change in self.changes
            ],
            "monta_saves_pct": None if self.monta_saved is None else 100 * self.monta_saved,
            "notes": list(self.notes),
            "watched_exchange_ms": self.watched_exchange_ms,
        }

    def text(self, width: int = WIDTH) -> str:
        """The report, in lines of at most so many characters but for names of parts."""
        record, settings, measured = self.record, self.settings, self.record.iteration_ms
        tflops = record.tflops_per_gpu
        micro_batches = counted(settings.num_micro_batches, "micro-batch")
        lines_of = partial(wrapped, width=width, break_words=True)
        guess = f", guessed from {record.gpu} and the ranks; --cluster NAME for another"
        lines = [
            *lines_of(
                f"{record.file}: {counted(settings.world_size, 'rank')}, TP {settings.tp}, PP "
                f"{settings.pp}, EP {settings.ep}, {micro_batches} of "
                f"{settings.micro_batch_size} x {settings.seq_length:,} tokens"
            ),
            *lines_of(f"cluster: {self.cluster.name}{guess * self.is_guessed}"),
            *lines_of(
                f"measured: {measured:,.0f} ms an iteration, the median of "
                f"{len(record.steady_ms):,} ({min(record.steady_ms):,.0f} to "
                f"{max(record.steady_ms):,.0f})"
                + ("" if tflops is None else f"; {tflops:,.0f} TFLOP/s per GPU")
                + f"; {record.num_skipped} skipped" * bool(record.num_skipped)
            ),
            "",
        ]
        parts = [part for part in self.predicted.parts_ms.items() if part[0] != HIDDEN]
        rows = [part for part in parts if part[1] >= LEAST_SHOWN_MS]
        rows += [("predicted", self.predicted.total_ms), (UNEXPLAINED, self.unexplained_ms)]
        if self.watched_exchange_ms is not None:
            rows.append(("the exchange, as watched", self.watched_exchange_ms))
        cells = [(part, f"{ms:,.0f}", f"{ms / measured:.0%}") for part, ms in rows]
        lines += [table(("part", ">ms", ">of measured"), cells), "", "likely causes:"]
        for number, (cause, ms, line) in enumerate(self.causes, 1):
            lines += lines_of(f"{cause}: {ms:,.0f} ms, {ms / measured:.0%}", first=f"{number}. ")
            lines += lines_of(line[:width], first="   ")
        lines += ["", "changes that would save most, predicted:"]
        for number, change in enumerate(self.changes, 1):
            saved = f"saves {change.saved * measured:,.0f} ms ({change.saved:.0%})"
            note = f"; {change.note}" * bool(change.note)
            lines += lines_of(f"{change.name}: {saved}: {change.flags}{note}", first=f"{number}. ")
        if not self.changes:
            lines.append(f"none that saves {LEAST_SAVED:.0%}")
        if self.monta_saved is not None:
            lines += lines_of(f"monta: {_verdict(self.monta_saved)}")
        for note in self.notes:
            lines += lines_of(f"note: {note}")
        return "\n".join(lines)


def _verdict(saved: float) -> str:
    if saved < LEAST_SAVED:
        return "does not pay here: the exchange is short, hidden, or inside a node"
    return f"would save {saved:.0%} of the iteration, predicted"


def explain(
    record: TrainingRecord, cluster_name: str | None, watched_exchange_ms: float | None = None
) -> IterationReport:
    """Explain the iteration of a log.

    Args:
        record: the log.
        cluster_name: a cluster file or preset; None to guess from the log.
        watched_exchange_ms: the exchange of an iteration, where it was watched.

    Raises:
        ValueError: one line: the log lacks a size, or no cluster is known.
    """
    # Step 1: how it was trained, and where.
    arguments, file = record.arguments, record.file
    model = architecture_of(arguments, file)
    settings = _settings(record)
    cluster = _cluster(record, settings, cluster_name)
    is_cpu = record.gpu == CPU_RANKS
    try:
        gpu = CPU_RANKS if is_cpu else gpu_of(cluster.name, None if cluster_name else record.gpu)
    except ValueError:
        raise ValueError(
            f"--cluster: got {cluster.name}, must have the name of a GPU in its name: "
            f"{', '.join(gpu_names())}"
        ) from None
    assumed = assumptions_of(gpu, cluster.name)

    # Step 2: as it ran; the training of ours as its plan would run.
    ran_monta = _value(arguments, "moe-token-dispatcher-type") == "monta"
    predict = _with_monta if ran_monta else estimate_iteration
    predicted = predict(model, settings, cluster, assumed)

    # Step 3: one change at a time.
    changes = []
    for name, flags, changed, note in _candidates(record, settings):
        saved = _saved(record, predicted, predict(model, changed, cluster, assumed))
        changes.append(Change(name=name, flags=flags, saved=saved, note=note))
    monta_saved = None
    if not ran_monta and settings.dispatcher == "alltoall":
        with_monta = _with_monta(model, settings, cluster, assumed)
        monta_saved = _saved(record, predicted, with_monta)
        flags = "--moe-token-dispatcher-type monta"
        changes.append(Change(name="monta for alltoall", flags=flags, saved=monta_saved))
    # Of several micro-batch sizes the smallest that saves nearly as much as the best.
    best: dict[str, float] = {}
    for change in changes:
        best[change.name] = max(change.saved, best.get(change.name, LEAST_SAVED))
    chosen = {
        change.name: change
        for change in reversed(changes)
        if change.saved >= NEARLY * best[change.name]
    }
    notes = [
        f"not modelled: {text}"
        for key, text in NOT_MODELLED.items()
        if key in arguments and not (model.linear and key == "experimental-attention-variant")
    ]
    notes += cluster.notes_on(settings.world_size)
    return IterationReport(
        record=record,
        cluster=cluster,
        is_guessed=cluster_name is None,
        settings=settings,
        predicted=predicted,
        causes=tuple(_causes(record, predicted)),
        changes=tuple(sorted(chosen.values(), key=lambda change: -change.saved)[:MOST_CHANGES]),
        monta_saved=monta_saved,
        notes=tuple(dict.fromkeys(notes)),
        watched_exchange_ms=watched_exchange_ms,
    )


def _saved(record: TrainingRecord, predicted: Iteration, changed: Iteration) -> float:
    """Share of the measured iteration that a change saves; what is not explained stays."""
    saved_ms = predicted.total_ms - changed.total_ms
    return saved_ms / max(predicted.total_ms, record.iteration_ms)


def _value(arguments: Arguments, name: str) -> str | None:
    return str(arguments[name].value) if name in arguments else None


def _settings(record: TrainingRecord) -> TrainingSettings:
    arguments, file = record.arguments, record.file
    for name in ("world-size", "global-batch-size", "micro-batch-size", "seq-length"):
        if name not in arguments:
            raise ValueError(
                f"--log: {file}: says no {name.replace('-', '_')}, must hold the arguments that "
                "the training printed when it started"
            )
    sizes = {
        field: arguments[name].read(SIZE)
        for field, name in PARALLEL_ARGUMENTS.items()
        if name in arguments
    }
    # Megatron's default.
    sizes.setdefault("etp", sizes.get("tp", 1))
    try:
        layout = ParallelLayout(world_size=arguments["world-size"].read(SIZE), **sizes)
        settings = settings_of(arguments, layout)
    except ValueError as error:
        raise ValueError(f"--log: {file}: {error}") from None
    backend = _value(arguments, "moe-flex-dispatcher-backend") or "deepep"
    if _value(arguments, "moe-token-dispatcher-type") == "flex" and backend in BACKENDS:
        settings = replace(settings, dispatcher=backend)
    if "overlap-grad-reduce" in record.lines and "overlap-grad-reduce" not in arguments:
        settings = replace(settings, overlap_gradients=False)
    return settings


def _cluster(record: TrainingRecord, settings: TrainingSettings, name: str | None) -> Cluster:
    if name is None and record.gpu in (None, CPU_RANKS):
        raise ValueError(
            f"--cluster: not given, must be, as {record.file} names no GPU that is "
            "known: a file, or a preset of configs/clusters"
        )
    cluster = load_cluster(name or nearest_preset(record.gpu, 8))
    if name is None:
        num_nodes = math.ceil(settings.world_size / cluster.ranks_per_node)
        cluster = replace(cluster, num_nodes=max(num_nodes, cluster.num_nodes))
    if settings.world_size > cluster.num_ranks:
        raise ValueError(
            f"--cluster: {cluster.name} has {cluster.num_ranks} ranks, must have at least the "
            f"{settings.world_size} of {record.file}"
        )
    return cluster.with_kernel_choice("auto")


def _with_monta(
    model: Architecture, settings: TrainingSettings, cluster: Cluster, assumed: Assumptions
) -> Iteration:
    """The iteration with the planner's choice."""
    plain = replace(settings, dispatcher="alltoall")
    workload = workload_of(model, plain, cluster)
    price = select_chain(workload, cluster).price
    chain, num_chunks = price.chain, price.num_chunks
    chosen = chosen_time(model, plain, workload, cluster, assumed, chain, num_chunks)
    return estimate_iteration(model, plain, cluster, assumed, chosen)


def _candidates(
    record: TrainingRecord, settings: TrainingSettings
) -> Iterator[tuple[str, str, TrainingSettings, str]]:
    """Name, flags, settings and condition of each change that the run does not have."""
    used = record.peak_memory_bytes
    fits = "where it fits" + (f": {gb_text(used)} are allocated now" if used else "")
    for times in LARGER:
        size = settings.micro_batch_size * times
        if settings.global_batch_size % (size * settings.layout.dp) == 0:
            larger = replace(settings, micro_batch_size=size)
            yield "a larger micro-batch", f"--micro-batch-size {size}", larger, fits
    if not settings.overlap and settings.ep > 1:
        changed, notes = with_1f1b_overlap(settings)
        flags = "--overlap-moe-expert-parallel-comm"
        if notes:
            flags += f" --num-virtual-stages-per-pipeline-rank {changed.virtual_stages}"
        yield "1F1B overlap of the exchange", flags, changed, ""
    if settings.recompute == "full":
        yield (
            "no full recompute",
            "without --recompute-granularity full",
            replace(settings, recompute="none"),
            fits,
        )
    if not settings.overlap_gradients:
        overlapped = replace(settings, overlap_gradients=True)
        yield "overlap of the gradient reduction", "--overlap-grad-reduce", overlapped, ""
    if not settings.graphs:
        flags = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router"
        yield "CUDA graphs", flags, replace(settings, graphs=True), ""
    if not settings.permute_fusion:
        fused = replace(settings, permute_fusion=True)
        yield "a fused permutation", "--moe-permute-fusion", fused, ""


# Part of the iteration -> the cause, and the argument whose line speaks for it.
CAUSES = {
    EXCHANGE: ("the exchange of tokens, which nothing hides", "moe-token-dispatcher-type"),
    HOST: ("the host, which starts kernels more slowly than they run", "micro-batch-size"),
    BUBBLE: ("the pipeline's bubble", "pipeline-model-parallel-size"),
    "recompute": ("layers that are computed again", "recompute-granularity"),
    "uneven stages": ("pipeline stages of unequal work", "pipeline-model-parallel-size"),
    "TP communication": ("tensor parallel collectives", "tensor-model-parallel-size"),
    "gradient reduction": ("the reduction of gradients", "global-batch-size"),
}


def _causes(record: TrainingRecord, predicted: Iteration) -> list[tuple[str, float, str]]:
    causes = [
        (text, predicted.parts_ms.get(part, 0.0), record.lines.get(name, "not in the log"))
        for part, (text, name) in CAUSES.items()
    ]
    unexplained_ms = record.iteration_ms - predicted.total_ms
    if unexplained_ms > MUCH_UNEXPLAINED * record.iteration_ms:
        text = "a network or GPUs far below their rates, or experts out of balance (not predicted)"
        causes.append((text, unexplained_ms, "the iterations' times: see `not explained`"))
    found = [cause for cause in causes if cause[1] >= LEAST_SAVED * record.iteration_ms]
    return sorted(found, key=lambda cause: -cause[1])[:MOST_CAUSES]
