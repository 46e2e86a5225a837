"""Tables of `monta estimate`, in which all times are predicted."""

import textwrap

from monta_megatron.common.tables import table
from monta_megatron.common.units import counted
from monta_megatron.tools.estimate.estimate import (
    CHOSEN,
    OVERLAPPED,
    PIPELINED,
    STOCK,
    Estimate,
    memory_gb,
)
from monta_megatron.tools.estimate.iteration import HIDDEN

# Dispatcher -> the heading of its column; what begins with + adds to monta.
COLUMNS = {
    STOCK: "alltoall",
    STOCK + OVERLAPPED: "1F1B",
    CHOSEN: "monta",
    PIPELINED: "+experts",
    CHOSEN + OVERLAPPED: "+1F1B",
    "flex, deepep": "deepep",
    "flex, hybridep": "hybridep",
}
WIDTH = 80
# Of the sources of assumptions, beside their names and values.
SOURCE_WIDTH = 42
# Below this no one would notice.
LEAST_SAVING_PCT = 1


def estimate_lines(of: Estimate) -> list[str]:
    """All of an estimate."""
    settings, plan = of.settings, of.plan
    sizes = ", ".join(
        f"{name.upper()} {size}"
        for name in ("tp", "cp", "pp", "ep", "etp")
        if (size := getattr(settings, name)) > 1
    )
    micro_batches = counted(settings.num_micro_batches, "micro-batch")
    batch = f"{micro_batches} of {settings.micro_batch_size} x {settings.seq_length:,} tokens; "
    about = (
        f"{of.name} on {settings.world_size:,} ranks of {of.cluster.name} ({of.gpu})",
        f"{sizes}; {batch}recompute: {settings.recompute}",
        f"monta: {plan.chain} in {counted(plan.num_chunks, 'chunk')}, the planner's choice",
    )
    return [
        *(line for text in about for line in textwrap.wrap(text, WIDTH)),
        "",
        *_parts(of),
        "",
        *_savings(of),
        "",
        *_memory(of),
        "",
        *_assumptions(of),
        *(line for note in of.notes for line in textwrap.wrap(f"note: {note}", WIDTH)),
    ]


def _parts(of: Estimate) -> list[str]:
    # In the order in which they first occur; what is hidden stands last.
    parts = dict.fromkeys(
        part for each in of.iterations.values() for part in each.parts_ms if part != HIDDEN
    )
    rows: list[list[object]] = []
    for part in (*parts, "iteration", HIDDEN):
        cells: list[object] = [part]
        for name in COLUMNS:
            each = of.iterations[name]
            time = each.total_ms if part == "iteration" else each.parts_ms.get(part, 0.0)
            cells.append(f"{time:,.0f}" if time >= 0.5 else "0" if time == 0 else "<1")
        rows.append(cells)
    for end, place in (("at the least", 0), ("at the most", -1)) if of.ends else ():
        ranges = [of.iteration_range_ms(name) or [0.0] for name in COLUMNS]
        rows.append([end, *(f"{range_ms[place]:,.0f}" for range_ms in ranges)])
    rates = [f"{of.iterations[name].tflops_per_gpu:,.0f}" for name in COLUMNS]
    rows.append(["TFLOP/s per GPU", *rates])
    return [table(["predicted ms", *(f">{short}" for short in COLUMNS.values())], rows)]


def _savings(of: Estimate) -> list[str]:
    # Iterations of which the GPU-hours are shown, each number once.
    numbers = [num for num in dict.fromkeys((1000, of.num_iterations)) if num is not None]
    rows = [
        (
            name,
            f"{of.saving_pct(name):+.1f}%{_ends(of.saving_range_pct(name))}",
            *(f"{of.saved_gpu_hours(name, num):,.1f}" for num in numbers),
        )
        for name in COLUMNS
        if name != STOCK
    ]
    columns = ["predicted saving", ">of alltoall", *(f">GPU-h of {num:,}" for num in numbers)]
    lines = [table(columns, rows)]
    if max(of.saving_pct(CHOSEN), of.saving_pct(PIPELINED)) < LEAST_SAVING_PCT:
        lines.append(
            f"Predicted: not worth it here, less than {LEAST_SAVING_PCT}% of an iteration."
        )
    return lines


def _ends(range_pct: list[float] | None) -> str:
    return "" if range_pct is None else f" ({range_pct[0]:.0f}..{range_pct[-1]:.0f})"


def _memory(of: Estimate) -> list[str]:
    rows = [(name, f"{size:.2f}") for name, size in memory_gb(of.memory).items()]
    return [table(("at the least on a rank, predicted", ">GB"), rows)]


def _assumptions(of: Estimate) -> list[str]:
    rows: list[tuple[str, str, str]] = []
    for entry in of.assumed.of.values():
        source = ("fitted: " if entry.fitted else "") + entry.source
        first, *others = textwrap.wrap(source, SOURCE_WIDTH)
        rows.append((entry.name, f"{entry.value:g}", first))
        rows += [("", "", line) for line in others]
    return [table(("assumption", ">value", "source"), rows)]
