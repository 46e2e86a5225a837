"""What a training says, and writes, when its tuning is over; imported then."""

from megatron.core import parallel_state

from monta_megatron.integration.reports import Report
from monta_megatron.planner.online.tuning import Tuning
from monta_megatron.planner.online.tuning_report import plan_of_tuning, plan_path, tuning_table
from monta_megatron.planner.select import Selection


def report_tuning(
    tuning: Tuning, selection: Selection, max_tokens: int, report: Report, plan_out: str | None
) -> None:
    """Say what a tuning has found, and write it as a plan if one is asked for.

    Args:
        tuning: which is over.
        selection: what can run, priced for the traffic of the tuning.
        max_tokens: the most tokens of a rank.
        report: prints a message.
        plan_out: file for the plan; None for none.
    """
    report(*tuning_table(tuning))
    if plan_out is None or not report.reports:
        return
    stage = parallel_state.get_pipeline_model_parallel_rank()
    path = plan_path(plan_out, stage, parallel_state.get_pipeline_model_parallel_world_size())
    try:
        plan_of_tuning(selection, tuning, max_tokens).save(path)
    except ValueError as error:
        # The training goes on.
        report(f"moe_monta_plan_out: {error}")
    else:
        report(f"the plan of this tuning: {path}")
