"""The cost model over values of one factor, on clusters nobody needs to have."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from monta_megatron.chains import CHAINS
from monta_megatron.common.tables import WIDTH, table
from monta_megatron.common.units import counted, size_text
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.cluster_file import with_inter_rate
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.models.training_memory import TrainingMemory
from monta_megatron.planner.plan import Plan
from monta_megatron.planner.routing.names import ROUTINGS
from monta_megatron.planner.select import MARGIN
from monta_megatron.tools.plan.request import PlanInputs, PlanRequest, benefit_of_plan, plan_request

VALUES_PER_TABLE = 4
# Of the choice's range: place, and the row's name.
ENDS = ((0, "its range, from"), (1, "to"))


def plan_at(
    request: PlanRequest,
    inputs: PlanInputs,
    factor: str,
    value: float,
    memory_limit_bytes: float | None = None,
) -> tuple[Plan, TrainingMemory, Benefit | None]:
    """The plan with this value of the factor, everything else as requested; memory and benefit.

    Args:
        request: to plan.
        inputs: model, cluster and layout.
        factor: "tokens", "ranks", "top-k", "chunks" or "inter-rate-ratio".
        value: what it is.
        memory_limit_bytes: what the exchange may hold; where every chain holds more, the plan is
            the one that holds the least.

    Raises:
        ValueError: the factor cannot have that value here, or no chain can run.
    """
    model, cluster = inputs.model, inputs.cluster
    settings: dict[str, Any] = {"memory_limit_bytes": memory_limit_bytes, "or_least": True}
    if factor == "tokens":
        request = replace(request, tokens=int(value))
    elif factor == "inter-rate-ratio":
        inputs = replace(inputs, cluster=with_inter_rate(cluster, value))
    elif factor == "chunks":
        settings["num_chunks"] = (value,)
    elif factor == "top-k":
        if request.routing not in ROUTINGS:
            raise ValueError(
                f"--sweep: got top-k, must be another factor beside the trace {request.routing}, "
                "whose top-k is what it is"
            )
        if value > model.num_experts:
            raise ValueError(
                f"--sweep: top-k: got {value}, must be at most the {model.num_experts} experts of "
                f"{model.name}"
            )
        inputs = replace(inputs, model=replace(model, moe_router_topk=int(value)))
    else:
        layout = _layout_of(inputs, int(value))
        num_nodes = max(math.ceil(layout.world_size / cluster.ranks_per_node), cluster.num_nodes)
        inputs = replace(inputs, layout=layout, cluster=replace(cluster, num_nodes=num_nodes))
    where = f"--sweep: {factor} {_shown(value)}"
    plan, _, memory = plan_request(request, inputs, where, **settings)
    return plan, memory, benefit_of_plan(request, inputs, plan)


def _layout_of(inputs: PlanInputs, num_ranks: int) -> ParallelLayout:
    """The layout with exchanges of `num_ranks` ranks, on as many more ranks as these take."""
    layout = inputs.layout
    ep, rest = divmod(num_ranks, layout.etp)
    if rest or inputs.model.num_experts % max(ep, 1):
        raise ValueError(
            f"--sweep: ranks: got {num_ranks}, must be ETP ({layout.etp}) times a divisor of the "
            f"{inputs.model.num_experts} experts of {inputs.model.name}"
        )
    world_size = math.lcm(layout.world_size, num_ranks * layout.pp)
    return replace(layout, ep=ep, world_size=world_size)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Plans over values of one factor.

    Attributes:
        request, inputs: of all of them.
        factor: see `plan_at`.
        values: that it takes.
        memory_limit_bytes: what the exchange may hold; None for no limit.
        planned: plan, memory and benefit at each value.
    """

    request: PlanRequest
    inputs: PlanInputs
    factor: str
    values: Sequence[float]
    memory_limit_bytes: float | None
    planned: Sequence[tuple[Plan, TrainingMemory, Benefit | None]]

    @property
    def plans(self) -> list[Plan]:
        """The plan at each value."""
        return [plan for plan, _, _ in self.planned]

    @property
    def title(self) -> str:
        """The values that stay the same."""
        model, layout, factor = self.inputs.model, self.inputs.layout, self.factor
        given = self.request.tokens
        tokens = layout.tokens_per_rank(model) if given is None else given
        parts = [
            f"{model.name} on {self.inputs.cluster.name}: TP {layout.tp}",
            *([] if factor == "ranks" else [f"EP {layout.ep}"]),
            f"ETP {layout.etp}",
            *([] if factor == "tokens" else [f"{counted(tokens, 'token')} per rank"]),
        ]
        return ", ".join(parts)

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "title": self.title,
            "factor": self.factor,
            "points": [
                {
                    "value": value,
                    "chain": plan.chain,
                    "num_chunks": plan.num_chunks,
                    "predicted_us": plan.predicted_us,
                    "range_us": plan.range_us,
                    "reason": plan.reason,
                    "best_us": plan.best_us(),
                    "least_bytes": {chain: best_within(plan, chain)[1] for chain in CHAINS},
                    "notes": list(plan.notes),
                    "memory": memory.document(),
                    "benefit": None if benefit is None else benefit.document(),
                }
                for value, (plan, memory, benefit) in zip(self.values, self.planned, strict=True)
            ],
        }

    def text(self) -> str:
        """Tables of a few values each, and what is said of all of them."""
        most = max((memory for _, memory, _ in self.planned), key=lambda each: each.needed_bytes)
        notes = dict.fromkeys(note for plan in self.plans for note in plan.notes)
        about = [
            *textwrap.wrap(self.title, WIDTH),
            *textwrap.wrap(f"needs {most.describe()}", WIDTH),
        ]
        after = [
            "us, each chain in its best number of chunks; * the choice, in its own: the",
            f"fastest, or a plainer one within {MARGIN:.0%} of it; - cannot run; over: holds more",
            "than it may in any number of chunks",
            *textwrap.wrap(self._largest_benefit(), WIDTH),
            *(line for note in notes for line in textwrap.wrap(f"note: {note}", WIDTH)),
        ]
        return "\n\n".join(["\n".join(about), *self._tables(), "\n".join(after)])

    def _tables(self) -> list[str]:
        """Chains down, values across, a few in each table so that 80 columns hold it."""
        tables = []
        for first in range(0, len(self.planned), VALUES_PER_TABLE):
            part = self.planned[first : first + VALUES_PER_TABLE]
            plans, memories = [plan for plan, _, _ in part], [memory for _, memory, _ in part]
            benefits = [plan.benefit for plan in plans]
            ratios = ["-" if benefit is None else f"{benefit.ratio:.2f}x " for benefit in benefits]
            ends = [[name, *(_end(plan.range_us, at) for plan in plans)] for at, name in ENDS]
            rows = [[chain, *(self._cell(*each[:2], chain) for each in part)] for chain in CHAINS]
            of_choice = [
                ["chunks of the choice", *(f"{plan.num_chunks} " for plan in plans)],
                ["times stock alltoall", *ratios],
                *([] if all(plan.range_us is None for plan in plans) else ends),
                ["its exchange holds", *(f"{size_text(one.exchange_bytes)} " for one in memories)],
                ["a rank needs", *(f"{size_text(one.needed_bytes)} " for one in memories)],
            ]
            values = self.values[first : first + len(part)]
            columns = [self.factor, *(f">{_shown(value)} " for value in values)]
            tables.append(table(columns, [*rows, *of_choice]))
        return tables

    def _cell(self, plan: Plan, memory: TrainingMemory, chain: str) -> str:
        given = (self.memory_limit_bytes, memory.left_bytes)
        limits = [limit for limit in given if limit is not None]
        best_us, least_bytes = best_within(plan, chain, min(limits, default=math.inf))
        if least_bytes is None:
            return "- "
        if plan.chain != chain:
            return "over " if best_us is None else f"{best_us:,.0f} "
        # In its number of chunks, by which it was chosen.
        return "over*" if best_us is None else f"{plan.predicted_us:,.0f}*"

    def _largest_benefit(self) -> str:
        """The benefit where it is the largest; "" where there is none to tell."""
        known = [
            (benefit, value)
            for (_, _, benefit), value in zip(self.planned, self.values, strict=True)
            if benefit is not None
        ]
        if not known:
            return ""
        largest, value = max(known, key=lambda entry: entry[0].ratio)
        return f"at {self.factor} {_shown(value)}: {largest.text}"


def simulate(
    request: PlanRequest,
    inputs: PlanInputs,
    factor: str,
    values: Sequence[float],
    memory_limit_bytes: float | None = None,
) -> Simulation:
    """Plan at every value; see `plan_at`."""
    planned = [plan_at(request, inputs, factor, value, memory_limit_bytes) for value in values]
    return Simulation(
        request=request,
        inputs=inputs,
        factor=factor,
        values=values,
        memory_limit_bytes=memory_limit_bytes,
        planned=planned,
    )


def best_within(
    plan: Plan, chain: str, limit_bytes: float = math.inf
) -> tuple[float | None, float | None]:
    """A chain's time in its best number of chunks that holds no more, and the least that it holds.

    Either is None where there is none.
    """
    candidates = [
        (candidate.predicted_us, candidate.peak_bytes)
        for candidate in plan.candidates
        if candidate.chain == chain
        and candidate.predicted_us is not None
        and candidate.peak_bytes is not None
    ]
    within_us = [time_us for time_us, peak_bytes in candidates if peak_bytes <= limit_bytes]
    return min(within_us, default=None), min((peak for _, peak in candidates), default=None)


def _end(range_us: Sequence[float] | None, at: int) -> str:
    return "- " if range_us is None else f"{range_us[at]:,.0f} "


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
