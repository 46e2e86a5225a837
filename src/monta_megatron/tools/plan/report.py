"""Plans and layout rankings as text of 80 columns."""

import textwrap
from collections.abc import Iterable, Sequence

from monta_megatron.common.tables import WIDTH, table
from monta_megatron.common.units import counted, size_text
from monta_megatron.core import Choice
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.curves import RESOURCE_NAMES
from monta_megatron.planner.models.training_memory import TrainingMemory
from monta_megatron.planner.plan import Candidate, Plan, StageCost
from monta_megatron.tools.plan.iteration import IterationShare
from monta_megatron.tools.plan.layout_ranking import RankedLayout

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
    share: IterationShare | None = None,
) -> list[str]:
    """The choice, its gain and the training's memory, then all chains, the chosen one by stages.

    Args:
        plan: the choice.
        memory: of the training.
        benefit: gain in an iteration.
        share: of a measured iteration.
    """
    fields = plan_fields(plan, memory, benefit)
    fields += [] if share is None else [("iteration", share.text)]
    lines = [line for field in fields for line in _field(*field)]
    lines += ["", *_candidate_lines(plan)]
    if plan.stages:
        lines += ["", *_stage_lines(plan.stages)]
    return lines


def plan_fields(
    plan: Plan, memory: TrainingMemory | None = None, benefit: Benefit | None = None
) -> list[tuple[str, str]]:
    """Fields of a plan's report: request, choice and times, as names and texts."""
    key = plan.key
    time = f": {plan.predicted_us:,.0f}{range_text(plan.range_us)} us"
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
        ("choice", f"{plan.chain} in {chunks}{time}, {PHASES[key.phase]}"),
        ("flags", Choice(chain=plan.chain, num_chunks=plan.num_chunks).flags),
        ("why", plan.reason),
        *([] if benefit is None else [("benefit", benefit.text)]),
        *([] if memory is None else [("needs", memory.text)]),
        *(("note", note) for note in plan.notes),
    ]


def range_text(range_us: tuple[float, float] | None) -> str:
    """The ends of a likely time, behind it."""
    return "" if range_us is None else " ({:,.0f} to {:,.0f})".format(*range_us)


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
            "peak: held by the exchange on a rank. needs: that, weights, gradients, optimizer and "
            "the inputs of all layers. Name a layout (--tp --ep --etp) to see its plan."
        ),
        *_wrapped(f"The first needs {memory.text}."),
        *([] if benefit is None else _wrapped(f"Its benefit: {benefit.text}.")),
    ]


def standing_lines(plan: Plan, entry: Candidate) -> list[str]:
    """Rank of one candidate beside the choice."""
    if entry.predicted_us is None:
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
    # The choice, else the fastest.
    shown = [
        min(entries, key=lambda entry: entry.rejected is not None) for entries in by_chain.values()
    ]
    return sorted(shown, key=plan.candidates.index)


def _candidate_lines(plan: Plan) -> Iterable[str]:
    """The best number of chunks of every chain, and why it was not chosen."""
    yield f"{'chain':<23}{'chunks':>6}{'us':>12}{'inter':>12}{'intra':>12}{'peak':>12}"
    shown = shown_candidates(plan)
    for entry in shown:
        if entry.predicted_us is None:
            yield f"{entry.chain:<23}{'-':>6}"
        else:
            sizes = "".join(
                f"{size_text(num_bytes):>12}"
                for num_bytes in (entry.inter_bytes, entry.intra_bytes, entry.peak_bytes)
            )
            yield f"{entry.chain:<23}{entry.num_chunks:>6}{entry.predicted_us:>12,.0f}{sizes}"
        ends = "" if entry.range_us is None else "; {:,.0f} to {:,.0f} us".format(*entry.range_us)
        yield from _wrapped(f"{entry.rejected or 'chosen'}{ends}", indent="    ")
    hidden = len(plan.candidates) - len(shown)
    if hidden > 0:
        yield f"and {hidden} more in other numbers of chunks, all of them with --json"


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
