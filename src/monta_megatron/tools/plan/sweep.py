"""`monta plan --sweep KEY=a,b,c`: the choice and its gain for each value of one key."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monta_megatron.common.flags import num_tokens, positive, whole
from monta_megatron.common.tables import table
from monta_megatron.common.text import one_of
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.tools.plan.request import PlanRequest, plan_request, read_inputs

# Key -> reader of a value.
KEYS: dict[str, Callable[[str], Any]] = {
    "tokens": num_tokens(1),
    "world-size": whole(1),
    "inter-rate-ratio": positive,
    "ep": whole(1),
}
COLUMNS = ("chain", ">chunks", ">us", ">alltoall us", ">speedup")


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """A plan for each value of a key.

    Attributes:
        key: that changes.
        rows: one for each value: its plan's choice, or why there is none.
    """

    key: str
    rows: Sequence[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {"sweep": self.key, "rows": list(self.rows)}

    def text(self) -> str:
        """A row per value."""
        cells = [
            (row["value"], row["why_not"], None, None, None, None)
            if row["chain"] is None
            else (
                row["value"],
                row["chain"],
                row["num_chunks"],
                f"{row['predicted_us']:,.0f}",
                None if row["stock_us"] is None else f"{row['stock_us']:,.0f}",
                None if row["ratio"] is None else f"{row['ratio']:.2f}x",
            )
            for row in self.rows
        ]
        return table((f">{self.key}", *COLUMNS), cells)


def parse_sweep(text: str) -> tuple[str, tuple[Any, ...]]:
    """The key and the values of KEY=a,b,c.

    Raises:
        ArgumentTypeError: it has another form, or a value breaks the key's rule.
    """
    key, _, values = text.partition("=")
    if key not in KEYS or not values:
        raise ArgumentTypeError(f"got {text!r}, must be KEY=a,b,c with KEY {one_of(key, KEYS)}")
    return key, tuple(KEYS[key](value.strip()) for value in values.split(","))


def sweep(request: PlanRequest, key: str, values: Sequence[Any]) -> SweepReport:
    """Plan a layout for each value; with world-size the cluster has as many nodes as that takes.

    Raises:
        ValueError: no value can be planned; the first one's reason.
    """
    rows = []
    problems: list[ValueError] = []
    for value in values:
        changed = replace(request, **{key.replace("-", "_"): value})
        if key == "world-size" and isinstance(request.cluster, str):
            cluster = load_cluster(request.cluster)
            of_node = request.ranks_per_node or cluster.ranks_per_node
            changed = replace(
                changed, cluster=replace(cluster, num_nodes=math.ceil(value / of_node))
            )
        try:
            plan = plan_request(changed, read_inputs(changed))[0]
        except ValueError as problem:
            problems.append(problem)
            rows.append({"value": value, "chain": None, "why_not": str(problem)})
            continue
        stock_us = plan.stock_us
        rows.append(
            {
                "value": value,
                "chain": plan.chain,
                "num_chunks": plan.num_chunks,
                "predicted_us": plan.predicted_us,
                "stock_us": stock_us,
                "ratio": stock_us / plan.predicted_us if stock_us and plan.predicted_us else None,
            }
        )
    if len(problems) == len(values):
        raise problems[0]
    return SweepReport(key=key, rows=rows)
