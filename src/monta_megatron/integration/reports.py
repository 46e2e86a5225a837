"""What is printed for users: once per pipeline stage, and never twice."""

from typing import Any

import torch.distributed as dist

from monta_megatron.common.text import shown

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
