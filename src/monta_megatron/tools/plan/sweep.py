"""`monta plan --sweep KEY=a,b,c`: the choice and its gain for each value of one key."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from monta_megatron.common.text import table
from monta_megatron.tools.plan.request import PlanRequest, plan_request


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
        cells = "{value} {chain} {num_chunks} {predicted_us:,.0f} {stock_us:,.0f} {ratio:.2f}x"
        columns = (f">{self.key}", "chain", ">chunks", ">us", ">alltoall us", ">speedup")
        return table(columns, [cells.format(**row).split() for row in self.rows])


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
        names = ("chain", "num_chunks", "predicted_us", "stock_us")
        row = {"value": value, **{name: getattr(plan, name) for name in names}}
        rows.append({**row, "ratio": row["stock_us"] / row["predicted_us"]})
    return SweepReport(key, rows)
