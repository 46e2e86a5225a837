"""Outputs of `monta plan`: a plan or a ranking, a sweep, and a run file.

Texts have at most 25 lines of 100 columns.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monta_megatron.common import files, strict_yaml
from monta_megatron.common.errors import UserError
from monta_megatron.common.rules import require
from monta_megatron.common.text import counted, size_text, table
from monta_megatron.core import Choice
from monta_megatron.planner.curves import RESOURCE_NAMES
from monta_megatron.planner.layout import PARALLEL_ARGUMENTS, uneven_stages
from monta_megatron.planner.plan import IterationShare, Plan
from monta_megatron.planner.ranking import best, cross_or_stay
from monta_megatron.tools.plan.request import Planned, PlanRequest, plan_request

WIDTH, MOST_LINES, MOST_LAYOUTS = 100, 25, 8
_WRAPPER = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False)
# Heading of a column -> attribute.
BYTES = {">inter": "inter_bytes", ">intra": "intra_bytes"}
CHAIN = {"chain": "chain", ">chunks": "num_chunks"}
CHAINS = {**CHAIN, ">us": "predicted_us", **BYTES, ">peak": "peak_bytes", "why not": "rejected"}
STAGES = {"pass": "pass_name", "stage": "stage", "occupies": "resource", ">us alone": "alone_us"}
LAYOUTS = {
    **{">nodes": "num_nodes", ">PP": "pp", ">TP": "tp", ">EP": "ep", ">ETP": "etp"},
    **{">tokens": "tokens", **CHAIN, ">us/1k": "us_per_1k_tokens"},
    **{">peak": "peak_bytes", ">needs": "needed_bytes"},
}


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan, or a ranking of layouts with the plan of the best.

    Attributes:
        planned: the plan.
        share: of the exchange in a measured iteration, or None.
        chain: whose standing is asked, or None.
        with_stages: whether the text has the table by stage.
    """

    planned: Planned
    share: IterationShare | None = None
    chain: str | None = None
    with_stages: bool = False

    def document(self) -> dict[str, Any]:
        """The JSON document; `docs/plans.md` has its fields."""
        planned = self.planned
        return {
            **strict_yaml.plain(planned.plan),
            "memory": planned.memory.document(),
            "benefit": planned.benefit.document(),
            "stock_us": planned.plan.stock_us,
            "layouts": strict_yaml.plain(planned.ranking),
            **(strict_yaml.plain(self.share) or {}),
        }

    def text(self) -> str:
        """The choice and all chains, or the layouts, as far as there is room."""
        planned, ranking = self.planned, self.planned.ranking
        ranks = counted(planned.layout.world_size, "rank")
        lines = [f"{planned.model.name} on {planned.cluster.name}, {ranks}", ""]
        if ranking is None:
            rows = _table(CHAINS, planned.plan.best.values())
        else:
            inside, across = best(ranking, in_node=True), best(ranking, in_node=False)
            order = sorted(ranking, key=lambda each: (each is not inside, each is not across))
            rows = _table(LAYOUTS, order[:MOST_LAYOUTS])
            rows.append(f"{len(ranking)} layouts fit; all of them with --json")
        fields = [_WRAPPER.wrap(f"{name:<10}{text}") for name, text in self._fields()]
        room = MOST_LINES - len(lines) - len(rows) - 1
        while sum(map(len, fields)) > room:
            fields[-2:] = [["more      in the document of --json"]]
        lines += [*(line for field in fields for line in field), "", *rows]
        if self.with_stages:
            lines += ["", *_table({**STAGES, **BYTES}, planned.plan.stages)]
        return "\n".join(lines)

    def _fields(self) -> Iterator[tuple[str, str]]:
        """Request, choice and answers, the most important first."""
        planned, plan, shape = self.planned, self.planned.plan, self.planned.plan.shape
        choice = Choice(chain=plan.chain, num_chunks=plan.num_chunks)
        if planned.ranking is not None:
            yield "layout", cross_or_stay(planned.ranking)
        else:
            yield (
                "exchange",
                f"{shape.layout.name}, {shape.tokens_per_rank:,} tokens of a rank, "
                f"top-{shape.routing.max_experts_per_token} of {shape.routing.num_experts} "
                f"experts, {shape.routing.name}",
            )
        ends = "" if plan.range_us is None else " ({:,.0f} to {:,.0f})".format(*plan.range_us)
        time = f"{plan.predicted_us:,.0f}{ends} us per layer and micro-batch"
        yield "choice", f"{choice.name}: {time}"
        if planned.ranking is None:
            yield "flags", choice.flags
            yield "why", plan.reason
        if self.chain is not None:
            yield "asked", _standing(plan, self.chain)
        if self.share is not None:
            yield "iteration", self.share.text
        yield "benefit", planned.benefit.text
        yield "needs", planned.memory.text
        yield from (("note", note) for note in plan.notes)
        rates = (f"{RESOURCE_NAMES[name]} {rate}" for name, rate in plan.rates.items())
        yield "rates", f"{', '.join(rates)}; their sources are in the cluster file"


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
    """The standing of a chain beside the choice."""
    entry = plan.best[chain]
    if entry.predicted_us is None or entry.num_chunks is None:
        return f"{chain} cannot run here: {entry.rejected}"
    name = Choice(chain=chain, num_chunks=entry.num_chunks).name
    ratio = entry.predicted_us / plan.predicted_us
    return f"{name} takes {ratio:.2f} times the choice's time; {entry.rejected or 'it is that'}"


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
        UserError: a value cannot be planned.
    """
    rows = []
    for value in values:
        try:
            plan = plan_request(replace(request, **{key.replace("-", "_"): value})).plan
        except UserError as problem:
            raise UserError(f"--sweep {key}={value}: {problem}") from problem
        names = ("chain", "num_chunks", "predicted_us", "stock_us")
        row = {"value": value, **{name: getattr(plan, name) for name in names}}
        rows.append({**row, "ratio": row["stock_us"] / row["predicted_us"]})
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
    layout, cluster, plan = planned.layout, planned.cluster, planned.plan
    on_host = min(cluster.ranks_per_host or cluster.ranks_per_node, layout.world_size)
    rule = f"be whole hosts of {on_host} for a run file"
    require(layout.world_size % on_host == 0, "world_size", layout.world_size, rule)
    default_batch = 4 * layout.pp * planned.model.micro_batch_size * layout.dp
    megatron = {
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
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "_", planned.model.name),
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
    head = f"# `monta plan --out` chose {plan.chain} x{plan.num_chunks}: {plan.reason}.\n"
    files.write_whole(path, f"{head}{strict_yaml.dump(data)}{TO_FILL_IN}")


def _place(kind: files.ConfigKind, given: str) -> str:
    """A preset by its name; another file by its whole path."""
    found = files.find_config(kind, given)
    return found.stem if found.parent == files.CONFIGS / kind else str(found.absolute())
