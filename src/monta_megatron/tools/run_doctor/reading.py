"""Read the folder of a run: its files, and the medians of its newest watched iterations."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from monta_megatron.chains import CHAINS, check_chain
from monta_megatron.chains.program import Resource
from monta_megatron.chains.wire_format import quantized_passes
from monta_megatron.common import strict_yaml
from monta_megatron.common.files import read_json_lines
from monta_megatron.common.rules import NonNegativeFloat
from monta_megatron.common.units import counted
from monta_megatron.integration.options import AUTO, DISPATCHER_TYPE
from monta_megatron.planner.chain_price import ChainPrice, price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import with_experts
from monta_megatron.planner.online.drift import BUSY, Change, MeasuredIteration
from monta_megatron.planner.plan import Plan
from monta_megatron.planner.select import select_chain
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.launch.arguments import DISPATCHER, Arguments
from monta_megatron.tools.launch.exchanges import RunExchanges, exchanges_of_run, iteration_of_run
from monta_megatron.tools.launch.log import ITERATION, TrainingLog, not_repeated, read_log
from monta_megatron.tools.launch.planning import memory_limit_bytes
from monta_megatron.tools.launch.prepare import read_run
from monta_megatron.tools.run_doctor.figures import (
    Choice,
    ExchangeFigures,
    LinkChange,
    MemoryFigures,
    RunFigures,
    WhatIf,
)
from monta_megatron.tools.run_doctor.training_log import TrainingRecord, read_training_log

# A thousand iterations with one in 50 watched: long enough for a median, short enough to be now.
MOST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class WatchedLine(MeasuredIteration):
    """A line of the file: an iteration, from 1, and the change noticed in it.

    The first files had neither `link_ms` nor `predicted_busy_ms`.
    """

    link_ms: Mapping[Resource, NonNegativeFloat] = field(default_factory=dict)
    predicted_busy_ms: Mapping[str, NonNegativeFloat] = field(default_factory=dict)
    change: Change | None = None


def read_watched(path: Path) -> list[WatchedLine]:
    """Lines that count in a file of --moe-monta-watch-out: the newest, and all with a change.

    Raises:
        ValueError: one line that names the file, the line, the key, the value and the rule.
    """
    lines = not_repeated(
        (_iteration(line, f"{path}: line {number}"), (number, line))
        for number, line in enumerate(read_json_lines(path), 1)
    )
    # Strict reading takes seven times as long as parsing.
    return [
        _read(line, f"{path}: line {number}")
        for left, (_, (number, line)) in zip(range(len(lines), 0, -1), lines, strict=True)
        if left <= MOST_LINES or line.get("change") is not None
    ]


def _iteration(line: Any, place: str) -> int:
    match line:
        case {"iteration": int(iteration)}:
            return iteration
    # Which says what is wrong with it.
    return _read(line, place).iteration


def _read(line: Any, place: str) -> WatchedLine:
    match line:
        # A change has the words, too, that its figures make.
        case {"change": {"text": _, **change}}:
            line = {**line, "change": change}
    watched = strict_yaml.build(WatchedLine, line, place)
    check_chain(watched.chain, f"{place}: chain")
    return watched


def summed_up(lines: Sequence[WatchedLine], name: str) -> ExchangeFigures:
    """Medians of the newest lines: those of the last chain, since the last change of a link.

    Args:
        lines: of a file, at least one.
        name: of the file.
    """
    last = lines[-1]
    since = max((number for number, line in enumerate(lines) if line.change is not None), default=0)
    newest = [
        line
        for line in lines[since:]
        if (line.chain, line.num_chunks) == (last.chain, last.num_chunks)
    ][-MOST_LINES:]
    waited_for = Counter(rank for line in newest for rank in line.slowest_ranks)
    return ExchangeFigures(
        kind="measured",
        basis=f"{name}, {_iterations(newest)}",
        chain=last.chain,
        num_chunks=last.num_chunks,
        exchange_ms=median(sum(line.exchange_ms.values()) for line in newest),
        predicted_ms=median(line.predicted_ms for line in newest),
        busy_ms=_medians(line.predicted_busy_ms for line in newest),
        link_ms=_medians(line.link_ms for line in newest),
        link_over_predicted=_medians(line.link_over_predicted for line in newest),
        calibrated_links=last.calibrated_links,
        avg_overload_factor=median(line.avg_overload_factor for line in newest),
        max_overload_factor=max(line.max_overload_factor for line in newest),
        imbalance=median(line.imbalance for line in newest),
        slowest_ranks={rank: times / len(newest) for rank, times in waited_for.most_common()},
    )


def changes_in_force(lines: Sequence[WatchedLine], name: str) -> list[LinkChange]:
    """The last change of each link, where it is slower than at first."""
    last = {
        line.change.resource: LinkChange(
            change=line.change, basis=f"{name}, iteration {line.iteration}"
        )
        for line in lines
        if line.change is not None
    }
    return [noticed for noticed in last.values() if noticed.change.rate_ratio < 1]


def _iterations(lines: Sequence[WatchedLine]) -> str:
    first, last = lines[0].iteration, lines[-1].iteration
    return f"{counted(len(lines), 'watched iteration')}, {first} to {last}"


def _medians(of_lines: Iterable[Mapping[Any, float]]) -> dict[str, float]:
    """Medians of the keys that every line has."""
    lines = list(of_lines)
    return {
        name: median(line[name] for line in lines)
        for name in lines[0]
        if all(name in line for line in lines)
    }


# Searched for in the folder itself and in its logs/.
WATCHED, PLANS, LOGS = "exchange_rank_*.jsonl", "plan*.yaml", "*.log"
# The dispatcher's words: `hierarchical_alltoall, 2 chunks with their experts, EP 8 x ...`.
RAN = re.compile(r"(\w+), ([\d,]+) chunks?( with their experts)?,")
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|oom.kill", re.IGNORECASE)
WATCH = (
    "--moe-monta-watch-steps N and, where `monta launch` has not started it, "
    "--moe-monta-watch-out DIR"
)


def read_run_folder(folder: Path) -> RunFigures:
    """Read all figures of a run.

    Args:
        folder: that of `monta launch`, or any with files of these names, see `WATCHED`.

    Raises:
        ValueError: one line: it holds nothing to read, or a file is malformed.
    """
    if not folder.is_dir():
        raise ValueError(f"--run: got {folder}, must be a folder")
    watched = {path: lines for path in _found(folder, WATCHED) if (lines := read_watched(path))}
    plans = [Plan.load(path) for path in _found(folder, PLANS)]
    logs = _logs(folder)
    if not (watched or plans or logs):
        raise ValueError(
            f"--run: got {folder}, must hold {WATCHED}, {PLANS} or {LOGS}, itself or in logs/; "
            f"a training writes the first with {WATCH}"
        )

    # Step 1: what was measured.
    texts = list(map(_text, logs))
    log = read_log("\n".join(texts))
    names = {path: str(path.relative_to(folder)) for path in watched}
    exchange, notes = None, list[str]()
    if watched:
        each = [summed_up(lines, names[path]) for path, lines in watched.items()]
        exchange = max(each, key=lambda of: of.exchange_ms)
        if len(each) > 1:
            notes.append(f"the slowest of {len(each)} exchanges")
        if not exchange.calibrated_links:
            notes.append(
                "no link is held against its predicted time, as none was measured (on CPU ranks, "
                "the network alone counts): monta calibrate, and --moe-monta-cluster"
            )
    else:
        notes.append(f"no iteration was watched: a training writes one in N with {WATCH}")
    figures = RunFigures(
        exchange=exchange,
        iteration_ms=log.ms_per_iteration,
        changes=tuple(
            change
            for path, lines in watched.items()
            for change in changes_in_force(lines, names[path])
        ),
        memory=MemoryFigures(
            out_of_memory=next(filter(None, map(_out_of_memory, texts)), None),
            basis=", ".join(str(path.relative_to(folder)) for path in logs),
            allocated_bytes=log.peak_memory_bytes,
        ),
    )

    # Step 2: what was predicted.
    if (folder / "config.yaml").is_file() and (folder / "run.sh").is_file():
        figures = _with_predictions(figures, folder / "config.yaml", plans, log, notes)
    else:
        notes.append("no run of `monta launch`: other choices are not priced, see `monta plan`")
    if figures.exchange is None and plans:
        slowest = max(plans, key=lambda plan: plan.predicted_us or 0.0)
        figures = replace(figures, exchange=_of_plan(slowest))
    return replace(figures, notes=tuple(notes))


def read_log_of_run(folder: Path) -> tuple[TrainingRecord, str | None]:
    """The log of a run that tells how it was trained, and its cluster, if the run file names one.

    Raises:
        ValueError: one line: there is no such log.
    """
    cluster = None
    if (folder / "config.yaml").is_file():
        arguments = read_run(str(folder / "config.yaml"), [])[1].arguments
        if "moe-monta-cluster" in arguments:
            cluster = str(arguments["moe-monta-cluster"].value)
    records = [read_training_log(path) for path in _logs(folder)]
    told = [record for record in records if record.arguments]
    if not told:
        raise ValueError(f"{folder}: no log holds the arguments that a training prints")
    return told[-1], cluster


def _found(folder: Path, pattern: str) -> list[Path]:
    return [*sorted(folder.glob(pattern)), *sorted((folder / "logs").glob(pattern))]


def _logs(folder: Path) -> list[Path]:
    """The logs; of Slurm's, `JOB.log`, that of the last job: what ended one before is over."""
    logs = _found(folder, LOGS)
    last = max((int(log.stem) for log in logs if log.stem.isdecimal()), default=None)
    return [log for log in logs if not log.stem.isdecimal() or int(log.stem) == last]


def _out_of_memory(text: str) -> str | None:
    """The first line that says that a rank had too little memory, and after which nothing ran."""
    said = None
    for line in text.splitlines():
        if ITERATION.search(line):
            said = None
        elif said is None and OUT_OF_MEMORY.search(line):
            said = line
    return said


def _text(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{log}: cannot be read: {error.strerror}") from error


def _with_predictions(
    figures: RunFigures, config: Path, plans: Sequence[Plan], log: TrainingLog, notes: list[str]
) -> RunFigures:
    """Add the planner's predictions for the run's model, cluster and layout, and notes."""
    _, merged = read_run(str(config), [])
    arguments, exchange = merged.arguments, figures.exchange
    if arguments[DISPATCHER].value != DISPATCHER_TYPE:
        notes.append(f"{DISPATCHER} is {arguments[DISPATCHER].value}: none of our exchanges ran")
        return figures
    if merged.config.model is None or "moe-monta-cluster" not in arguments:
        notes.append("the run file names no model and cluster: other choices are not priced")
        return figures
    exchanges = exchanges_of_run(merged.config, arguments, str(config))
    logged = None if log.chain is None else RAN.match(log.chain)
    if exchange is not None:
        ran = exchange.chain, exchange.num_chunks
    elif logged is not None:
        ran = logged[1], int(logged[2].replace(",", ""))
    elif plans:
        ran = plans[0].chain, plans[0].num_chunks
    else:
        notes.append("neither log nor plan names a chain")
        return figures
    check_chain(ran[0], f"{config.parent}: chain in the log")
    predictions, price = what_if(exchanges, arguments, ran, bool(logged and logged[3]))
    if exchange is None:
        iteration = iteration_of_run(exchanges.model, arguments, merged.config.layout.parallel)
        layers, micro_batches = iteration.num_moe_layers, iteration.num_micro_batches
        is_known = layers is not None and micro_batches is not None
        times = layers * micro_batches if layers and micro_batches else 1
        exchange = ExchangeFigures(
            kind="predicted",
            basis=predictions.basis,
            chain=price.chain.name,
            num_chunks=price.num_chunks,
            of_iteration=is_known,
            exchange_ms=price.total_us * times / 1e3,
            predicted_ms=price.total_us * times / 1e3,
            busy_ms={resource: price.busy_us(resource) * times / 1e3 for resource in BUSY},
        )
    return replace(
        figures,
        exchange=exchange,
        what_if=predictions,
        memory=replace(
            figures.memory,
            rank_bytes=exchanges.cluster.memory_bytes_per_rank,
            exchange_bytes=price.peak_bytes,
            limit_bytes=memory_limit_bytes(arguments),
        ),
    )


def _of_plan(plan: Plan) -> ExchangeFigures | None:
    """A plan alone, which holds the time of each stage; None for a choice by hand."""
    if plan.predicted_us is None or not plan.stages:
        return None
    return ExchangeFigures(
        kind="predicted",
        basis=f"plan for {plan.key.cluster}, {plan.key.routing} routing",
        chain=plan.chain,
        num_chunks=plan.num_chunks,
        of_iteration=False,
        exchange_ms=plan.predicted_us / 1e3,
        predicted_ms=plan.predicted_us / 1e3,
        busy_ms={
            resource: sum(stage.alone_us for stage in plan.stages if stage.resource == resource)
            / 1e3
            for resource in BUSY
        },
    )


# Arguments that leave auto nothing to choose.
NAMING = ("moe-monta-chain", "moe-monta-num-chunks", "moe-monta-plan")


def what_if(
    exchanges: RunExchanges, arguments: Arguments, ran: tuple[str, int], experts_pipelined: bool
) -> tuple[WhatIf, ChainPrice]:
    """Predictions of other choices, and the price of the run's own.

    For the model's own router and the tokens of a rank. Of exchanges that lie on the nodes in
    several ways, the one that is slowest as it ran counts.

    Args:
        exchanges: what the run exchanges.
        arguments: Megatron's arguments of the run.
        ran: chain and number of chunks.
        experts_pipelined: whether the experts ran in the pipeline.
    """
    model, kernels = exchanges.model, arguments.get("moe-monta-kernels")
    # As the training prices them, which runs fused kernels on a GPU unless it is told not to.
    fused = kernels is None or kernels.value != "torch"
    cluster = exchanges.cluster.with_kernels(fused)
    workloads = [
        replace(
            workload,
            quantized_passes=quantized_passes(
                "moe-monta-wire-dtype" in arguments, "moe-monta-wire-backward" in arguments
            ),
            keeps_sums="moe-monta-combine-dtype" in arguments,
        )
        for workload in exchanges.workloads
    ]
    price, workload = max(
        ((_price(workload, cluster, ran), workload) for workload in workloads),
        key=lambda priced: priced[0].total_us,
    )
    in_eight_bits = replace(workload, quantized_passes=quantized_passes(True))
    layers = select_chain(with_experts(workload, model, cluster), cluster).prices
    split = next((layer for layer in layers if layer.experts_pipelined), None)
    unsplit = next(layer for layer in layers if not layer.experts_pipelined)
    found = WhatIf(
        basis="model and cluster file, the model's own router",
        ran=_choice(price),
        fastest=_choice(select_chain(workload, cluster).price),
        eight_bits=None
        if workload.quantized_passes
        else _choice(_price(in_eight_bits, cluster, ran)),
        experts_us=unsplit.busy_us("compute"),
        unsplit=_choice(unsplit),
        split=None if split is None else _choice(split),
        is_named=any(name in arguments and arguments[name].value != AUTO for name in NAMING),
        experts_asked="moe-monta-overlap-experts" in arguments,
        experts_pipelined=experts_pipelined,
    )
    return found, price


def _price(workload: Workload, cluster: Cluster, ran: tuple[str, int]) -> ChainPrice:
    chain, num_chunks = ran
    return price_chain(workload, cluster, CHAINS[chain], num_chunks, "forward_backward")


def _choice(price: ChainPrice) -> Choice:
    return Choice(
        chain=price.chain.name,
        num_chunks=price.num_chunks,
        us=price.total_us,
        peak_bytes=price.peak_bytes,
    )
