"""`monta plan --sweep KEY=a,b,c`: the choice and its gain for each value of one key."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from monta_megatron.common.tables import table
from monta_megatron.tools.plan.request import PlanRequest, plan_request

COLUMNS = ("chain", ">chunks", ">us", ">alltoall us", ">speedup")


@dataclass(frozen=True)
class SweepReport:
    """The choice for each value of a key."""

    key: str
    rows: Sequence[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {"sweep": self.key, "rows": list(self.rows)}

    def text(self) -> str:
        """A row per value."""
        texts = ("{}", "{}", "{}", "{:,.0f}", "{:,.0f}", "{:.2f}x")
        cells = [
            [text.format(cell) for text, cell in zip(texts, row.values(), strict=True)]
            for row in self.rows
        ]
        return table((f">{self.key}", *COLUMNS), cells)


def sweep(request: PlanRequest, key: str, values: Sequence[Any]) -> SweepReport:
    """Plan for each value.

    Raises:
        ValueError: a value cannot be planned.
    """
    rows = []
    for value in values:
        try:
            plan = plan_request(replace(request, **{key.replace("-", "_"): value})).plan
        except ValueError as problem:
            raise ValueError(f"--sweep {key}={value}: {problem}") from problem
        assert plan.stock_us is not None, "plain alltoall can always run"
        rows.append(
            {
                "value": value,
                "chain": plan.chain,
                "num_chunks": plan.num_chunks,
                "predicted_us": plan.predicted_us,
                "stock_us": plan.stock_us,
                "ratio": plan.stock_us / plan.predicted_us,
            }
        )
    return SweepReport(key, rows)
