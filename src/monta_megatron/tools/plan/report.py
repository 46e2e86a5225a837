"""Outputs of `monta plan`: a plan or a ranking, a sweep, and a run file.

Lines have at most 100 columns.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from monta_megatron.common import files, strict_yaml
from monta_megatron.common.errors import UserError
from monta_megatron.common.rules import require
from monta_megatron.common.text import counted, number_text, size_text, table
from monta_megatron.core import Choice
from monta_megatron.integration.options import DISPATCHER_TYPE
from monta_megatron.planner.benefit import IterationShare
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import RESOURCE_NAMES
from monta_megatron.planner.layout import PARALLEL_ARGUMENTS, uneven_stages
from monta_megatron.planner.model import Model
from monta_megatron.planner.plan import Plan
from monta_megatron.planner.ranking import best, cross_or_stay, num_parameters
from monta_megatron.tools.launch.run_config import DISPATCHER
from monta_megatron.tools.plan.request import Planned, PlanRequest, plan_request

WIDTH, MAX_LAYOUTS = 100, 8
_WRAPPER = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False)
# Heading of a column -> attribute.
BYTES = {">inter": "inter_bytes", ">intra": "intra_bytes"}
CHAINS = {
    **{"chain": "name", ">chunks": "num_chunks", ">us": "predicted_us", **BYTES},
    **{">peak": "peak_bytes", "why not": "rejected"},
}
STAGES = {"pass": "pass_name", "stage": "stage", "occupies": "resource", ">us alone": "alone_us"}
LAYOUTS = {
    **{">nodes": "num_nodes", ">PP": "pp", ">TP": "tp", ">EP": "ep", ">ETP": "etp"},
    **{">tokens": "tokens", "dispatcher": "runs", ">us/1k": "us_per_1k_tokens"},
    **{">peak": "shown_peak_bytes", ">needs": "needed_bytes"},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table of dispatchers: stock's, and our chains in their best number of chunks.

    Attributes are those of `Candidate`; `name` is the chain's, or "stock alltoall".
    """

    name: str
    num_chunks: int | None
    predicted_us: float | None
    inter_bytes: float | None = None
    intra_bytes: float | None = None
    peak_bytes: float | None = None
    rejected: str | None


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan, or a ranking of layouts with the plan of the best.

    Attributes:
        planned: the plan of the request.
        share: share of the exchange in a measured iteration; None without one.
        chain: the chain whose standing is asked for; None if none is.
        with_stages: whether the text has the table by stage.
    """

    planned: Planned
    share: IterationShare | None = None
    chain: str | None = None
    with_stages: bool = False

    def document(self) -> dict[str, Any]:
        """The JSON document; `docs/plans.md` has its fields."""
        return {**self.planned.document(), **(strict_yaml.plain(self.share) or {})}

    def text(self) -> str:
        """What was assumed, what was counted, the recommendation, and all that was priced."""
        planned, ranking = self.planned, self.planned.ranking
        ranks = counted(planned.layout.world_size, "rank")
        lines = _WRAPPER.wrap(f"{planned.model.name} on {planned.nodes.name}, {ranks}")
        lines.append("")
        for name, text in self._fields():
            lines += _WRAPPER.wrap(f"{name:<10}{text}")
        lines.append("")
        if ranking is None:
            lines += _table(CHAINS, rows_of(planned))
        else:
            inside, across = best(ranking, in_node=True), best(ranking, in_node=False)
            order = sorted(ranking, key=lambda layout: (layout is not inside, layout is not across))
            lines += _table(LAYOUTS, order[:MAX_LAYOUTS])
            lines.append(f"{len(ranking)} layouts fit; all of them with --json")
        if self.with_stages:
            lines += ["", *_table({**STAGES, **BYTES}, planned.stages)]
        return "\n".join(lines)

    def _fields(self) -> Iterator[tuple[str, str]]:
        """Names and texts: what was assumed and not read, then request, choice and answers."""
        plan, model, shape = self.planned, self.planned.model, self.planned.shape
        yield from (("note", note) for note in plan.notes)
        yield "model", _model_text(model)
        if plan.ranking is not None:
            yield "layout", cross_or_stay(plan.ranking)
        else:
            yield (
                "exchange",
                f"{shape.layout.name}, {counted(shape.tokens_per_rank, 'token')} per rank, "
                f"top-{shape.routing.max_experts_per_token} of {shape.routing.num_experts} "
                f"experts, {shape.routing.name}",
            )
        ends = "" if plan.range_us is None else " ({:,.0f} to {:,.0f})".format(*plan.range_us)
        name, time = plan.choice.name, f"{plan.predicted_us:,.0f}{ends}"
        if plan.stock_wins:
            name, time = f"stock {plan.stock}", f"{plan.stock_us:,.0f}"
        yield "choice", f"{name}: {time} us per layer and micro-batch"
        if plan.ranking is None:
            yield "flags", plan.flags
            if not plan.stock_wins:
                yield "why", plan.reason
        if self.chain is not None:
            yield "asked", _standing(plan, self.chain)
        if self.share is not None:
            yield "iteration", self.share.text
        yield "benefit", plan.benefit.text
        yield "needs", plan.memory.text
        rates = (f"{RESOURCE_NAMES[name]} {rate}" for name, rate in plan.rates.items())
        yield "rates", f"{', '.join(rates)}{_source_text(self.planned.nodes)}"


def _model_text(model: Model) -> str:
    """The number of parameters that was counted, and the batch and the values that are sent."""
    number, micro_batch_size = num_parameters(model), model.micro_batch_size
    counted_text = "parameters cannot be counted"
    if number is not None:
        counted_text = f"{number_text(number)} parameters counted"
    return (
        f"{counted_text}; sequences of {counted(model.seq_length, 'token')}, {micro_batch_size} "
        f"per micro-batch; rows of {model.row_size:,} values of {8 * model.value_bytes} bits"
    )


def _source_text(cluster: Cluster) -> str:
    """Where the rates come from, as far as the cluster file says it."""
    links = (link for link in (cluster.network, cluster.node_link, cluster.memory) if link)
    if cluster.source is None or any(link.source is None for link in links):
        return "; the cluster file does not name the source of each"
    return "; their sources are in the cluster file"


def rows_of(plan: Plan) -> list[Row]:
    """Stock's dispatchers and our chains, the fastest first, what cannot run last."""
    rows = []
    for entry in plan.best.values():
        rejected = entry.rejected
        if plan.stock_wins and entry.predicted_us is not None:
            against = _against(plan, entry.predicted_us) or "refused by the training"
            rejected = f"{against}; {entry.busiest} {entry.busiest_us:,.0f} us"
        values = {name: getattr(entry, name) for name in ("num_chunks", "predicted_us")}
        values |= {name: getattr(entry, name) for name in (*BYTES.values(), "peak_bytes")}
        rows.append(Row(name=entry.chain, rejected=rejected, **values))
    for name, us in plan.stock_times_us.items():
        is_chosen = plan.stock_wins and name == plan.stock
        rejected = None if is_chosen else _against(plan, us)
        rows.append(Row(name=f"stock {name}", num_chunks=None, predicted_us=us, rejected=rejected))
    return sorted(rows, key=lambda row: inf if row.predicted_us is None else row.predicted_us)


def _against(plan: Plan, us: float) -> str | None:
    """How much slower than the recommended one so many us are; None where they are not."""
    ratio = us / plan.recommended_us
    if ratio <= 1:
        return None
    return f"{ratio - 1:.0%} slower" if ratio >= 1.01 else "under 1% slower"


def _table(columns: Mapping[str, str], entries: Iterable[object]) -> list[str]:
    """Lines of a table of attributes, as far as a line holds them."""

    def cell(entry: object, name: str) -> object:
        value = getattr(entry, name)
        if name.endswith("_bytes"):
            return size_text(value)
        return value if value is None or isinstance(value, str) else f"{value:,.0f}"

    rows = [[cell(entry, name) for name in columns.values()] for entry in entries]
    lines = table(tuple(columns), rows).splitlines()
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines]


def _standing(plan: Plan, chain: str) -> str:
    """The standing of a chain beside what is recommended."""
    row = next(row for row in rows_of(plan) if row.name == chain)
    if row.predicted_us is None or row.num_chunks is None:
        return f"{chain} cannot run here: {row.rejected}"
    name = Choice(chain=chain, num_chunks=row.num_chunks).name
    ratio = row.predicted_us / plan.recommended_us
    reason = row.rejected or "it is that"
    if plan.stock_wins and chain == plan.chain:
        reason = "the best chain of monta"
    return f"{name} takes {ratio:.2f} times the choice's time; {reason}"


@dataclass(frozen=True)
class SweepReport:
    """The choice for each value of a key, or why there is none: the `problem` of a row."""

    key: str
    rows: Sequence[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {"sweep": self.key, "rows": list(self.rows)}

    def text(self) -> str:
        """A row per value."""
        cells = "{value} {chain} {num_chunks} {predicted_us:,.0f}"
        cells += " {stock} {stock_us:,.0f} {ratio:.2f}x"
        columns = (f">{self.key}", "chain", ">chunks", ">us", "stock", ">us", ">speedup")
        planned = (row for row in self.rows if "problem" not in row)
        lines = [table(columns, [cells.format(**row).split() for row in planned])]
        lines += (
            f"not planned: {self.key}={row['value']}: {row['problem']}"
            for row in self.rows
            if "problem" in row
        )
        return "\n".join(lines)


def sweep(request: PlanRequest, key: str, values: Sequence[Any]) -> SweepReport:
    """Plan for each value; one that cannot be planned is a row that says why.

    Raises:
        UserError: no value can be planned; the problem is that of the first.
    """
    rows: list[dict[str, Any]] = []
    for value in values:
        try:
            plan = plan_request(replace(request, **{key.replace("-", "_"): value}))
        except UserError as problem:
            rows.append({"value": value, "problem": str(problem)})
            continue
        names = ("chain", "num_chunks", "predicted_us", "stock", "stock_us", "recommended")
        row = {"value": value, **{name: getattr(plan, name) for name in names}}
        rows.append({**row, "ratio": row["stock_us"] / row["predicted_us"]})
    if all("problem" in row for row in rows):
        raise UserError(f"--sweep {key}={rows[0]['value']}: {rows[0]['problem']}")
    return SweepReport(key, rows)


# Arguments of a training that no plan can know.
TO_FILL_IN = """\
  # To be filled in; tokens are random until a data path and a tokenizer are named
  train-iters: 1000
  lr: 1.0e-4
  mock-data: true
  tokenizer-type: NullTokenizer
  eval-iters: 0
  log-interval: 1
"""


def write_run(path: Path, request: PlanRequest, planned: Planned) -> None:
    """Write the run file of a plan.

    Raises:
        UserError: the ranks do not fill hosts, or the file cannot be written.
    """
    layout, cluster = planned.layout, planned.nodes
    on_host = min(cluster.ranks_per_host or cluster.ranks_per_node, layout.world_size)
    rule = f"be whole hosts of {on_host} for a run file"
    require(layout.world_size % on_host == 0, "world_size", layout.world_size, rule)
    default_batch = 4 * layout.pp * planned.model.micro_batch_size * layout.dp
    megatron = {
        DISPATCHER: planned.stock if planned.stock_wins else DISPATCHER_TYPE,
        "moe-monta-ranks-per-node": request.ranks_per_node and cluster.ranks_per_node,
        "sequence-parallel": layout.tp > 1,
        "seq-length": request.seq_length,
        "micro-batch-size": request.micro_batch_size,
        "global-batch-size": request.global_batch_size or default_batch,
        **(uneven_stages(planned.model, layout.pp) or {}),
        "moe-grouped-gemm": True,
        "moe-permute-fusion": True,
        "use-distributed-optimizer": True,
    }
    data = {
        "name": _run_name(planned.model.name),
        "model": _place("models", request.model),
        "cluster": _place("clusters", request.cluster),
        "layout": {
            "nodes": layout.world_size // on_host,
            "ranks_per_node": on_host,
            **{name: getattr(layout, name) for name in PARALLEL_ARGUMENTS},
        },
        # Megatron demands it before Blackwell.
        "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": 1} if layout.tp * layout.cp > 1 else {},
        "slurm": {"options": {"time": 240, "gpus-per-node": on_host, "exclusive": True, "mem": 0}},
        "megatron": {name: value for name, value in megatron.items() if value},
    }
    head = f"# `monta plan --out` chose {planned.choice.name}: {planned.reason}.\n"
    if planned.stock_wins:
        head = f"# `monta plan --out` chose stock {planned.stock}. Benefit of monta: "
        head += f"{planned.benefit.text}.\n"
    files.write_whole(path, f"{head}{strict_yaml.dump(data)}{TO_FILL_IN}")


def _run_name(model: str) -> str:
    """A run's name from that of a model, or from the path of its config.json."""
    path = Path(model)
    if path.suffix.lower() == ".json":
        model = path.absolute().parent.name if path.stem == "config" else path.stem
    # It begins with a letter or a digit.
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", model).lstrip("_.-") or "run"


def _place(kind: files.ConfigKind, given: str) -> str:
    """A preset by its name; another file by its whole path."""
    found = files.find_config(kind, given)
    return found.stem if found.parent == files.CONFIGS / kind else str(found.absolute())
