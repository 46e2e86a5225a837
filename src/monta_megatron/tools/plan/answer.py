"""The report of `monta plan` as text and JSON."""

from dataclasses import dataclass
from typing import Any

from monta_megatron.common import strict_yaml
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.models.training_memory import TrainingMemory
from monta_megatron.planner.plan import Candidate, Plan
from monta_megatron.tools.plan.iteration import IterationShare, iteration_share
from monta_megatron.tools.plan.report import (
    layout_lines,
    note_lines,
    plan_lines,
    rate_lines,
    standing_lines,
)
from monta_megatron.tools.plan.request import (
    PlanInputs,
    PlanRequest,
    benefit_of_plan,
    candidate_of,
    plan_request,
)


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan, or a ranking of layouts with the plan of the best.

    Attributes:
        inputs: of the plan.
        plan: the decision.
        memory: of a training on a rank.
        benefit: over stock; None where that was not priced.
        asked: the candidate that was asked for, or None.
        share: of a measured iteration, or None.
    """

    inputs: PlanInputs
    plan: Plan
    memory: TrainingMemory
    benefit: Benefit | None
    asked: Candidate | None
    share: IterationShare | None = None

    def document(self) -> dict[str, Any]:
        """The JSON document; `docs/plans.md` has its fields."""
        ranking = self.inputs.ranking
        document: dict[str, Any] = strict_yaml.plain(self.plan)
        document["memory"] = self.memory.document()
        document["benefit"] = None if self.benefit is None else self.benefit.document()
        document["stock_us"] = self.plan.stock_us
        if self.share is not None:
            document |= self.share.document()
        document["layouts"] = None if ranking is None else strict_yaml.plain(ranking)
        if self.asked is not None:
            document["asked"] = strict_yaml.plain(self.asked)
        return document

    def text(self) -> str:
        """Tables of 80 columns."""
        plan, inputs = self.plan, self.inputs
        if inputs.ranking is None:
            lines = plan_lines(plan, self.memory, self.benefit, self.share)
        else:
            lines = [
                *rate_lines(plan),
                *note_lines(plan),
                "",
                *layout_lines(inputs.ranking, self.memory, self.benefit),
            ]
        if self.asked is not None:
            lines = [*standing_lines(plan, self.asked), "", *lines]
        return "\n".join([f"{inputs.model.name} on {inputs.cluster.name}", "", *lines])


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Questions beside the plan itself.

    Attributes:
        chain: whose standing is asked; None for none.
        num_chunks: of that chain; None for its best number.
        iteration_ms: of a measured iteration; None for none.
        ran: what ran in it, see `iteration_share`.
        overlaps: likewise.
    """

    chain: str | None = None
    num_chunks: int | None = None
    iteration_ms: float | None = None
    ran: str = "alltoall"
    overlaps: tuple[str, ...] = ()


def answer(request: PlanRequest, inputs: PlanInputs, questions: Questions) -> PlanReport:
    """Plan, and answer what is asked of the plan.

    Raises:
        ValueError: no chain can run, or a question cannot be answered.
    """
    plan, _, memory = plan_request(request, inputs)
    benefit = benefit_of_plan(request, inputs, plan)
    chain, num_chunks, share = questions.chain, questions.num_chunks, None
    if questions.iteration_ms is not None:
        share = iteration_share(
            plan, benefit, questions.iteration_ms, questions.ran, questions.overlaps
        )
    return PlanReport(
        inputs=inputs,
        plan=plan,
        memory=memory,
        benefit=benefit,
        share=share,
        asked=None if chain is None else candidate_of(request, inputs, plan, chain, num_chunks),
    )
