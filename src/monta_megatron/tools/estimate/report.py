"""Tables of `monta estimate` and `monta validate`. What is predicted is called so."""

from collections.abc import Sequence

from monta_megatron.common.tables import table
from monta_megatron.tools.estimate.estimate import CHOSEN, PIPELINED, Estimate, memory_gb
from monta_megatron.tools.estimate.iteration import HIDDEN
from monta_megatron.tools.estimate.validation import Checked, median_error_pct

# Below the name of a table, as columns have no room for long names.
SHORT = {
    "alltoall": "alltoall",
    "monta": "monta",
    "monta, experts in the pipeline": "+experts",
    "alltoall, 1F1B overlap": "alltoall+1F1B",
    "monta, 1F1B overlap": "monta+1F1B",
    "flex, deepep": "deepep",
    "flex, hybridep": "hybridep",
}


def estimate_lines(of: Estimate) -> list[str]:
    """All of an estimate."""
    settings, plan = of.settings, of.plan
    sizes = ", ".join(
        f"{n.upper()} {getattr(settings, n)}" for n in ("tp", "cp", "pp", "ep", "etp")
    )
    return [
        f"{of.name} on {settings.world_size} ranks of {of.cluster.name} ({of.gpu}): {sizes}",
        f"{settings.num_micro_batches} micro-batches of {settings.micro_batch_size} x "
        f"{settings.seq_length} tokens, recompute {settings.recompute}",
        f"monta: {plan.chain} in {plan.num_chunks} chunks, the planner's choice",
        "",
        *_parts(of),
        "",
        *_savings(of),
        "",
        *_memory(of),
        "",
        *_assumptions(of),
        *(f"note: {note}" for note in of.notes),
    ]


def _parts(of: Estimate) -> list[str]:
    names = list(of.iterations)
    # In the order in which they first occur; what is hidden stands last.
    parts = dict.fromkeys(
        part for each in of.iterations.values() for part in each.parts_ms if part != HIDDEN
    )
    rows: list[list[object]] = []
    for part in (*parts, "iteration", HIDDEN):
        cells: list[object] = [part]
        for name in names:
            each = of.iterations[name]
            time = each.total_ms if part == "iteration" else each.parts_ms.get(part)
            cells.append(None if time is None else f"{time:,.1f}")
        rows.append(cells)
    rates = [f"{of.iterations[name].tflops_per_gpu:,.0f}" for name in names]
    rows.append(["TFLOP/s per GPU", *rates])
    columns = ["predicted ms", *(f">{SHORT[name]}" for name in names)]
    return [table(columns, rows)]


def _savings(of: Estimate) -> list[str]:
    rows = []
    for name in of.iterations:
        total = "-"
        if of.num_iterations is not None:
            total = f"{of.saved_gpu_hours(name, of.num_iterations):,.0f}"
        rows.append(
            [
                name,
                f"{of.saving_pct(name):+.1f}%",
                f"{of.saved_gpu_hours(name, 1000):,.1f}",
                total,
            ]
        )
    whole = "GPU-hours"
    if of.num_iterations is not None:
        whole += f" of {of.num_iterations:,}"
    columns = ("predicted saving", ">of alltoall", ">GPU-hours per 1,000 iterations", f">{whole}")
    lines = [table(columns, rows)]
    best = max((CHOSEN, PIPELINED), key=of.saving_pct)
    if of.saving_pct(best) < 1:
        lines.append("Predicted: not worth it here, less than 1% of an iteration.")
    return lines


def _memory(of: Estimate) -> list[str]:
    rows = [(name, f"{size:.2f}") for name, size in memory_gb(of.memory).items()]
    return [table(("at the least on a rank, predicted", ">GB"), rows)]


def _assumptions(of: Estimate) -> list[str]:
    rows = [
        (entry.name, f"{entry.value:g}", ("fitted: " if entry.fitted else "") + entry.source)
        for entry in of.assumed.of.values()
    ]
    return [table(("assumption", ">value", "source"), rows)]


def validation_lines(rows: Sequence[Checked]) -> list[str]:
    """Every row, and what the judged ones come to."""
    cells = [
        (
            row.id,
            row.family,
            "judged" if row.judged else "fitted",
            f"{row.predicted:,.2f}",
            f"{row.published:,.2f}",
            row.unit,
            f"{row.error_pct:+.1f}%",
            f"{row.tolerance_pct:g}%",
            "" if row.within else "missed",
        )
        for row in rows
    ]
    columns = ("row", "family", "", ">predicted", ">published", "unit", ">error", ">tolerance", "")
    return [table(columns, cells), "", *summary_lines(rows)]


def summary_lines(rows: Sequence[Checked]) -> list[str]:
    """The judged rows in numbers, all and by kind, and which rows are past their tolerance."""
    judged = [row for row in rows if row.judged]
    lines = []
    for kind in (None, *dict.fromkeys(row.kind for row in judged)):
        of_kind = [row for row in judged if kind in (None, row.kind)]
        past = sum(not row.within for row in of_kind)
        lines.append(
            f"{kind or 'all'}: {len(of_kind)} judged rows, median error "
            f"{median_error_pct(of_kind):.1f}%, {past} past the tolerance"
        )
    missed = [f"{row.id} ({row.error_pct:+.1f}%)" for row in rows if not row.within]
    if missed:
        lines.append(f"missed: {', '.join(missed)}")
    return lines
