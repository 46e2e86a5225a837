"""Reports of `monta estimate`, in which all times are predicted."""

import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monta_megatron.common import strict_yaml
from monta_megatron.common.tables import WIDTH, Progress, table
from monta_megatron.common.units import counted
from monta_megatron.planner.models.training_memory import TrainingMemory
from monta_megatron.tools.estimate.estimate import (
    CHOSEN,
    OVERLAPPED,
    PIPELINED,
    STOCK,
    Estimate,
    EstimateRequest,
    estimate,
)
from monta_megatron.tools.estimate.iteration import HIDDEN

if TYPE_CHECKING:
    from monta_megatron.tools.estimate.layout_ranking import IterationRanking

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
# Of the sources of assumptions, beside their names and values.
SOURCE_WIDTH = 42
# Below this no one would notice.
LEAST_SAVING_PCT = 1


@dataclass(frozen=True, kw_only=True)
class EstimateReport:
    """Report of one estimate."""

    estimate: Estimate

    def document(self) -> dict[str, Any]:
        """The JSON document; everything in it is predicted."""
        of = self.estimate
        num = of.num_iterations
        return {
            "name": of.name,
            "cluster": of.cluster.name,
            "gpu": of.gpu,
            "settings": strict_yaml.plain(of.settings),
            "plan": {"chain": of.plan.chain, "num_chunks": of.plan.num_chunks},
            "iteration_ms": {name: each.total_ms for name, each in of.iterations.items()},
            "iteration_range_ms": {name: of.iteration_range_ms(name) for name in of.iterations},
            "parts_ms": {name: each.parts_ms for name, each in of.iterations.items()},
            "tflops_per_gpu": {name: each.tflops_per_gpu for name, each in of.iterations.items()},
            "saving_pct": of.saving_pct(CHOSEN),
            "savings": {
                name: {
                    "percent": of.saving_pct(name),
                    "percent_range": of.saving_range_pct(name),
                    "gpu_hours_per_1000_iterations": of.saved_gpu_hours(name, 1000),
                    "gpu_hours": None if num is None else of.saved_gpu_hours(name, num),
                }
                for name in of.iterations
            },
            "memory_gb": memory_gb(of.memory),
            "assumptions": [
                {
                    "name": entry.name,
                    "value": entry.value,
                    "source": entry.source,
                    "fitted": entry.fitted,
                }
                for entry in of.assumed.of.values()
            ],
            "notes": list(of.notes),
        }

    def text(self) -> str:
        """Tables; all times in them are predicted."""
        of = self.estimate
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
        lines = [
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
        return "\n".join(lines)


def answer(
    request: EstimateRequest,
    progress: Callable[[], AbstractContextManager[Progress]] = lambda: nullcontext(Progress()),
) -> "EstimateReport | IterationRanking":
    """Estimate a run; a model and a cluster without a layout are ranked over all that fit.

    Args:
        request: what is estimated.
        progress: opened around a ranking, which takes seconds.

    Raises:
        ValueError: one line that names the file or flag, the value and the rule.
    """
    if request.config is None and not request.sizes.keys() & {"tp", "ep", "etp"}:
        from monta_megatron.tools.estimate.layout_ranking import rank_by_iteration

        return rank_by_iteration(request, progress)
    return EstimateReport(estimate=estimate(request))


def memory_gb(memory: TrainingMemory) -> dict[str, float]:
    """Memory of a rank at the least, by part, in GB."""
    parts = {
        "weights, gradients and optimizer": memory.state_bytes,
        "layer inputs": memory.activation_bytes,
        "exchange": memory.exchange_bytes,
        "communicators": memory.communicator_bytes,
        "total": memory.needed_bytes,
    }
    return {name: num_bytes / 1e9 for name, num_bytes in parts.items()}


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
    return "" if range_pct is None else f" ({round(range_pct[0])}..{round(range_pct[-1])})"


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
