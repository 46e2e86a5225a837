"""Questions of `monta plan` beside the plan itself, and its report as text and JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monta_megatron.common import strict_yaml
from monta_megatron.common.units import bytes_of_gb
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.models.training_memory import TrainingMemory
from monta_megatron.planner.plan import Candidate, Plan
from monta_megatron.planner.select import MARGIN
from monta_megatron.tools.plan.report import (
    Row,
    layout_lines,
    note_lines,
    plan_lines,
    program_lines,
    program_of,
    rate_lines,
    standing_lines,
)
from monta_megatron.tools.plan.request import (
    PlanInputs,
    PlanRequest,
    benefit_of_plan,
    candidate_of,
    check_has_layout,
    plan_request,
)


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Limits of a plan, and further questions.

    Attributes:
        memory_limit_gb: what the exchange may hold; None for no limit.
        margin: by how much a plainer chain may be slower; None for the default.
        overlapped_compute_us: computation that overlaps the exchange.
        chain: whose standing is asked; None for none.
        num_chunks: of that chain; None for its best number.
        program: whether the operations of the choice are shown.
        out: file for the plan; None for none.
        force: whether that file may exist.
    """

    memory_limit_gb: float | None = None
    margin: float | None = None
    overlapped_compute_us: float = 0.0
    chain: str | None = None
    num_chunks: int | None = None
    program: bool = False
    out: str | None = None
    force: bool = False

    @property
    def limits(self) -> dict[str, Any]:
        """Arguments of `planner.select.select_chain` for a ranking of layouts, too."""
        return {
            "memory_limit_bytes": bytes_of_gb(self.memory_limit_gb),
            "margin": MARGIN if self.margin is None else self.margin,
        }

    def check(self, *, has_layout: bool, overlap_experts: bool) -> None:
        """Refuse questions that cannot be answered.

        Raises:
            ValueError: the file exists, or a question needs a layout or a chain.
        """
        if self.out is not None and not self.force and Path(self.out).is_file():
            raise ValueError(f"--out: got {self.out}, must not exist; --force overwrites it")
        reason = "how long computation takes depends on the tokens of a rank"
        for is_asked, flag, why in (
            (
                self.overlapped_compute_us > 0,
                f"--overlapped-compute-us: got {self.overlapped_compute_us:g}",
                reason,
            ),
            (overlap_experts, "--overlap-experts: given", reason),
            (self.chain is not None, f"--chain: got {self.chain}", "it stands in a plan"),
        ):
            if is_asked:
                check_has_layout(has_layout, flag, why)
        if self.chain is None and self.num_chunks is not None:
            raise ValueError(f"--num-chunks: got {self.num_chunks}, must be with --chain")


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan, or a ranking of layouts with the plan of the best.

    Attributes:
        request, inputs: of the plan.
        plan: the decision.
        memory: of a training on a rank.
        benefit: over stock; None where that was not priced.
        programs: pass -> its operations; empty unless asked for.
        asked: the candidate that was asked for, or None.
    """

    request: PlanRequest
    inputs: PlanInputs
    plan: Plan
    memory: TrainingMemory
    benefit: Benefit | None
    programs: Mapping[str, list[Row]]
    asked: Candidate | None

    def document(self) -> dict[str, Any]:
        """The JSON document; `docs/plans.md` has its fields."""
        ranking = self.inputs.ranking
        document: dict[str, Any] = strict_yaml.plain(self.plan)
        document["memory"] = self.memory.document()
        document["benefit"] = None if self.benefit is None else self.benefit.document()
        document["layouts"] = None if ranking is None else strict_yaml.plain(ranking)
        if self.programs:
            document["operations"] = self.programs
        if self.asked is not None:
            document["asked"] = strict_yaml.plain(self.asked)
        return document

    def text(self) -> str:
        """Tables of 80 columns."""
        plan, inputs = self.plan, self.inputs
        if inputs.ranking is None:
            lines = plan_lines(plan, self.memory, self.benefit)
        else:
            lines = [
                *rate_lines(plan),
                *note_lines(plan),
                "",
                *layout_lines(inputs.ranking, self.memory, self.benefit),
            ]
        if self.asked is not None:
            lines = [*standing_lines(plan, self.asked), "", *lines]
        if self.programs:
            lines += ["", *program_lines(dict(self.programs))]
        return "\n".join([f"{inputs.model.name} on {inputs.cluster.name}", "", *lines])


def answer(request: PlanRequest, inputs: PlanInputs, questions: Questions) -> PlanReport:
    """Plan, and answer what is asked of the plan; writes its file if one is asked for.

    Raises:
        ValueError: no chain can run, or the file cannot be written.
    """
    beside: dict[str, Any] = {"overlapped_compute_us": questions.overlapped_compute_us}
    plan, workload, memory = plan_request(request, inputs, **beside, **questions.limits)
    asked = None
    if questions.chain is not None:
        asked = candidate_of(request, inputs, plan, questions.chain, questions.num_chunks, **beside)
    benefit = benefit_of_plan(request, inputs, plan)
    report = PlanReport(
        request=request,
        inputs=inputs,
        plan=plan,
        memory=memory,
        benefit=benefit,
        programs=program_of(plan, workload, inputs.cluster) if questions.program else {},
        asked=asked,
    )
    if questions.out is not None:
        plan.save(questions.out)
    return report
