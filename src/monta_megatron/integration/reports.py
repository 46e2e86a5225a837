"""What is printed for users: once per pipeline stage, and never twice."""

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import parallel_state

from monta_megatron.common.texts import shown

if TYPE_CHECKING:
    from monta_megatron.planner.selection import Selection
    from monta_megatron.planner.tuning import Tuning

_reported: set[tuple[str, ...]] = set()


class Report:
    """Prints messages that were not printed before, if this rank reports for its stage.

    Each stage may have a chain of its own.
    """

    def __init__(self, reports: bool) -> None:
        self.reports = reports

    def __call__(self, *lines: str) -> bool:
        """Print the lines of a message; whether it was printed now."""
        if not self.reports or lines in _reported:
            return False
        _reported.add(lines)
        rank = dist.get_rank()
        where = "monta" if rank == 0 else f"monta, rank {rank}"
        # Printed, as Megatron prints what users should see; its log starts at WARNING.
        print("\n".join(shown(f"{where}: {line}") for line in lines), flush=True)
        return True


def reports_for_stage(exchange: dist.ProcessGroup, pg_collection: Any) -> bool:
    """Whether this rank reports for its pipeline stage: the first rank of its first exchange."""
    exchanges = getattr(pg_collection, "expt_dp", None)
    if exchanges is None:
        return dist.get_rank() == 0
    return all(dist.get_group_rank(group, dist.get_rank()) == 0 for group in (exchange, exchanges))


def report_tuning(
    tuning: "Tuning", selection: "Selection", max_tokens: int, report: Report, plan_out: str | None
) -> None:
    """Say what a tuning has found, and write it as a plan if one is asked for.

    Args:
        tuning: which is over.
        selection: what can run, priced for the traffic of the tuning.
        max_tokens: the most tokens of a rank.
        report: prints a message.
        plan_out: file for the plan; None for none.
    """
    from monta_megatron.planner.tuning_report import plan_of_tuning, plan_path, tuning_table

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
