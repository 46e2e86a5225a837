"""Plans, layout rankings and programs as text of 80 columns, as JSON and as a picture."""

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from monta_megatron.chains import CHAINS
from monta_megatron.chains.pipelined_layer import BoundLayer
from monta_megatron.chains.program import PASSES, BoundProgram, Operation
from monta_megatron.common.tables import WIDTH, table
from monta_megatron.common.units import counted, size_text
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.chain_price import RESOURCE_NAMES
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layer_price import bound_layers
from monta_megatron.planner.models.training_memory import TrainingMemory
from monta_megatron.planner.plan import Candidate, Plan, StageCost
from monta_megatron.planner.workload import Workload
from monta_megatron.tools import pictures
from monta_megatron.tools.plan.layout_ranking import RankedLayout

# One operation on the first rank, as plain values; docs/plans.md has the fields.
Row: TypeAlias = dict[str, Any]


def program_of(plan: Plan, workload: Workload, cluster: Cluster) -> dict[str, list[Row]]:
    """Pass -> its operations, for the chain that a plan chose."""
    chain, phase = CHAINS[plan.chain], plan.key.phase
    programs: Sequence[BoundProgram | BoundLayer]
    if plan.experts_pipelined:
        place = replace(workload.layout, rank=0)
        programs = bound_layers(workload, chain, plan.num_chunks, place, cluster.policy, phase)
    else:
        bound = workload.bind(chain, plan.num_chunks)
        programs = [workload.lower(bound, pass_, cluster.policy) for pass_ in PASSES[phase]]
    return {
        program.program.pass_.name: [
            _row(program, operation) for operation in program.program.operations
        ]
        for program in programs
    }


def program_lines(programs: dict[str, list[Row]]) -> Iterator[str]:
    """A table for each pass."""
    for pass_, rows in programs.items():
        cells = [
            (
                row["number"],
                row["operation"],
                row["stage"],
                row["chunk"],
                f"{','.join(map(str, row['reads']))}>{row['writes'][0]}",
                f"{row['rows']:.0f}",
                size_text(row["bytes"]),
                " ".join(filter(None, (row["resource"], row["group"]))),
            )
            for row in rows
        ]
        name = pass_.replace("_", " ")
        columns = (">", name, "stage", ">in", ">moves", ">rows", ">bytes", "occupies")
        yield table(columns, cells) + "\n"
    yield "in: number of the chunk. moves: buffer read > written; 0: the pass's input."
    yield "rows and bytes: written by the first rank."


def _row(bound: BoundProgram | BoundLayer, operation: Operation) -> Row:
    written = bound.program.buffers[operation.writes[0]]
    rows, row_bytes = (
        bound.rows_written(operation),
        sum(written.message_bytes(bound.max_experts_per_token)),
    )
    return {
        "number": operation.number,
        "operation": operation.kind,
        "stage": operation.stage,
        "chunk": operation.chunk,
        "reads": list(operation.reads),
        "writes": list(operation.writes),
        "rows": rows if row_bytes else 0.0,
        "bytes": row_bytes * rows,
        "resource": operation.resource,
        "group": operation.group if operation.is_collective else None,
    }


# Letters of the title in a line.
TITLE_WIDTH = 80


def plot_plans(
    values: Sequence[float], plans: Sequence[Plan], label: str, title: str, path: Path
) -> None:
    """Draw time against the plans' differing factor, a line per chain, the choice ringed.

    Args:
        values: by plan, the value of the factor in which the plans differ.
        plans: one plan for each of them.
        label: what the values are.
        title: what all plans have in common.
        path: path of the PNG.
    """
    with pictures.figure(path, (7, 4.2)) as figure:
        axis = figure.subplots()
        for number, (chain, colour) in enumerate(pictures.CHAIN_COLOURS.items()):
            times_us = [plan.best_us()[chain] for plan in plans]
            if any(time is not None for time in times_us):
                shown = [math.nan if time is None else time for time in times_us]
                # Thinner lines on top, so that chains with the same time are both visible.
                style = {"linewidth": 3 - 0.4 * number, "markersize": 7 - 0.8 * number}
                axis.plot(values, shown, "o-", color=colour, label=chain, **style)
        axis.plot(
            values,
            [plan.predicted_us for plan in plans],
            "o",
            markersize=11,
            markerfacecolor="none",
            markeredgecolor=pictures.PICK_COLOUR,
            markeredgewidth=2,
            label="the planner's choice",
        )
        pictures.log_ticks(axis)
        axis.set_xticks(values)
        axis.set_xticks([], minor=True)
        axis.set(xlabel=label, ylabel="us, predicted")
        axis.grid()
        axis.legend()
        figure.suptitle(textwrap.fill(title, TITLE_WIDTH))


MAX_LAYOUTS = 20
PHASES = {
    "forward": "dispatch + combine, forward",
    "forward_backward": "dispatch + combine, forward + backward",
}
LAYOUT_COLUMNS = (">TP", ">EP", ">ETP", ">tokens", "chain", ">chunks", ">us/1k", ">peak", ">needs")
STAGE_COLUMNS = ("pass", "stage", "occupies", ">us alone", ">inter", ">intra")


def plan_lines(
    plan: Plan,
    memory: TrainingMemory | None = None,
    benefit: Benefit | None = None,
) -> list[str]:
    """The choice, its gain and the training's memory, then all chains, the chosen one by stages.

    Args:
        plan: the choice.
        memory: of the training.
        benefit: gain in an iteration.
    """
    lines = [line for field in plan_fields(plan, memory, benefit) for line in _field(*field)]
    lines += ["", *_candidate_lines(plan)]
    if plan.stages:
        lines += ["", *_stage_lines(plan.stages)]
    return lines


def plan_fields(
    plan: Plan, memory: TrainingMemory | None = None, benefit: Benefit | None = None
) -> list[tuple[str, str]]:
    """Fields of a plan's report: request, choice and times, as names and texts."""
    key = plan.key
    time = "" if plan.predicted_us is None else f": {plan.predicted_us:,.0f}"
    time += range_text(plan.range_us) + " us" if time else ""
    chunks = counted(plan.num_chunks, "chunk")
    return [
        (
            "exchange",
            f"EP {key.ep} x ETP {key.etp} over "
            f"{counted(len(set(key.nodes)), 'node')} of {key.cluster}",
        ),
        (
            "tokens",
            f"{key.tokens_per_rank:,} per rank, top-{key.topk} of "
            f"{key.num_experts} experts, {key.routing}",
        ),
        *_rate_fields(plan),
        ("choice", f"{plan.chain} in {chunks}{time}, {_phase(plan)}"),
        *([] if key.experts is None else [("experts", key.experts)]),
        *_beside_fields(plan),
        ("why", plan.reason),
        *([] if benefit is None else [("benefit", benefit.text)]),
        *([] if memory is None else [("needs", memory.describe())]),
        *(("note", note) for note in plan.notes),
    ]


def range_text(range_us: tuple[float, float] | None) -> str:
    """The ends of a likely time, behind it."""
    return "" if range_us is None else " ({:,.0f} to {:,.0f})".format(*range_us)


def _phase(plan: Plan) -> str:
    """Timed phase, and whether the experts are in the pipeline where they have a price."""
    phase = PHASES[plan.key.phase]
    if plan.key.experts is None:
        return phase
    how = "in the pipeline" if plan.experts_pipelined else "not split"
    return f"{phase}, with the experts, {how}"


def _beside_fields(plan: Plan) -> list[tuple[str, str]]:
    """Exposed part of the exchange, where computation overlaps it."""
    overlapped_compute_us, exposed_us = plan.key.overlapped_compute_us, plan.exposed_us
    if overlapped_compute_us == 0 or exposed_us is None:
        return []
    text = f"{exposed_us:,.0f} us beside {overlapped_compute_us:,.0f} us of computation"
    return [("exposed", f"{text}, by which all chains are ranked")]


def rate_lines(plan: Plan) -> list[str]:
    """The rate by which large messages were priced, a field for each resource."""
    return [line for field in _rate_fields(plan) for line in _field(*field)]


def note_lines(plan: Plan) -> list[str]:
    """Assumptions of a plan."""
    return [line for note in plan.notes for line in _field("note", note)]


def layout_lines(
    layouts: Sequence[RankedLayout], memory: TrainingMemory, benefit: Benefit | None = None
) -> list[str]:
    """One line per layout, the best first, with the time and gain of the best one."""
    lines = [table(LAYOUT_COLUMNS, layout_rows(layouts)[:MAX_LAYOUTS])]
    if len(layouts) > MAX_LAYOUTS:
        lines.append(f"and {len(layouts) - MAX_LAYOUTS} more, all of them with --json")
    return [
        *lines,
        "",
        *_wrapped(
            "tokens: of a rank. us/1k: exchange of one layer and micro-batch, per 1,000 of them. "
            "peak: held by the exchange on a rank. needs: that, its communicators, weights, "
            "gradients, optimizer and the inputs of all layers, the least that training holds on a "
            "rank. Name a layout (--tp --ep --etp) to see its plan."
        ),
        *_wrapped(f"The first needs {memory.describe()}."),
        *([] if benefit is None else _wrapped(f"Its benefit: {benefit.text}.")),
    ]


def standing_lines(plan: Plan, entry: Candidate) -> list[str]:
    """Rank of one candidate beside the choice."""
    if entry.predicted_us is None or plan.predicted_us is None:
        return _field(entry.chain, f"cannot run here: {entry.rejected}")
    chunks = counted(entry.num_chunks or 1, "chunk")
    time = f"in {chunks}: {entry.predicted_us:,.0f} us, "
    time += f"{entry.predicted_us / plan.predicted_us:.2f} times the choice's"
    return _wrapped(f"{entry.chain} {time}; {entry.rejected or 'it is the choice'}", indent="")


def layout_rows(layouts: Sequence[RankedLayout]) -> list[tuple[object, ...]]:
    """The layouts under `LAYOUT_COLUMNS`."""
    return [
        (
            layout.tp,
            layout.ep,
            layout.etp,
            f"{layout.tokens_per_rank:,}",
            layout.chain,
            layout.num_chunks,
            f"{layout.us_per_1k_tokens:,.0f}",
            size_text(layout.peak_bytes),
            size_text(layout.needed_bytes),
        )
        for layout in layouts
    ]


def shown_candidates(plan: Plan) -> list[Candidate]:
    """The best number of chunks of every chain, the fastest first."""
    by_chain: dict[str, list[Candidate]] = {}
    for entry in plan.candidates:
        by_chain.setdefault(entry.chain, []).append(entry)
    # The choice, else the fastest of those that are not the same as another chain.
    shown = [
        min(entries, key=lambda entry: (entry.rejected is not None, entry.same_as is not None))
        for entries in by_chain.values()
    ]
    return sorted(shown, key=plan.candidates.index)


def _candidate_lines(plan: Plan) -> Iterable[str]:
    """The best number of chunks of every chain, and why it was not chosen.

    Not by `tables`: a line over all columns follows each row, which no table there has.
    """
    # 80 columns hold a fifth number.
    has_beside = plan.key.overlapped_compute_us > 0
    width = 10 if has_beside else 12
    exposed = f"{'exposed':>11}" if has_beside else ""
    names = "".join(f"{name:>{width}}" for name in ("inter", "intra", "peak"))
    yield f"{'chain':<23}{'chunks':>6}{'us':>{width}}{exposed}{names}"
    shown = shown_candidates(plan)
    for entry in shown:
        if entry.predicted_us is None:
            yield f"{entry.chain:<23}{'-':>6}"
        else:
            exposed = f"{entry.exposed_us:>11,.0f}" if has_beside else ""
            sizes = "".join(
                f"{size_text(num_bytes):>{width}}"
                for num_bytes in (entry.inter_bytes, entry.intra_bytes, entry.peak_bytes)
            )
            time = f"{entry.predicted_us:>{width},.0f}"
            yield f"{entry.chain:<23}{entry.num_chunks:>6}{time}{exposed}{sizes}"
        split = "experts in the pipeline: " * entry.experts_pipelined
        ends = "" if entry.range_us is None else "; {:,.0f} to {:,.0f} us".format(*entry.range_us)
        yield from _wrapped(f"{split}{entry.rejected or 'chosen'}{ends}", indent="    ")
    hidden = len(plan.candidates) - len(shown)
    if hidden > 0:
        yield f"and {hidden} more in other numbers of chunks, all of them with --json or --out"


def stage_rows(stages: Sequence[StageCost]) -> list[tuple[str, ...]]:
    """The stages under `STAGE_COLUMNS`."""
    return [
        (
            stage.pass_name,
            stage.stage,
            stage.resource,
            f"{stage.alone_us:,.0f}",
            size_text(stage.inter_bytes),
            size_text(stage.intra_bytes),
        )
        for stage in stages
    ]


def _stage_lines(stages: Sequence[StageCost]) -> Iterable[str]:
    yield table(STAGE_COLUMNS, stage_rows(stages))
    yield "bytes are those of all ranks of one exchange; peak is that of one rank"


def _rate_fields(plan: Plan) -> list[tuple[str, str]]:
    return [
        (RESOURCE_NAMES[rate.resource], f"{rate.rate.in_both_units} {rate.basis}")
        for rate in plan.rates
    ]


def _field(name: str, text: str) -> list[str]:
    return _wrapped(text, first=f"{name:<10}", indent=" " * 10)


def _wrapped(text: str, first: str | None = None, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
