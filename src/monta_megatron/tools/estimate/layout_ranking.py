"""Every layout that fits a model and a cluster, ranked by its whole predicted iteration."""

import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from monta_megatron.common.tables import WIDTH, Progress, table
from monta_megatron.planner.chain_price import price_chain
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import with_batch
from monta_megatron.tools.estimate.estimate import (
    CHOSEN,
    Estimate,
    EstimateRequest,
    estimate_run,
    read_estimated_run,
)
from monta_megatron.tools.estimate.iteration import BUBBLE, EXCHANGE
from monta_megatron.tools.new.run import MICRO_BATCHES_PER_STAGE
from monta_megatron.tools.plan.layout_ranking import divisors, layouts_of

SIZES = ("tp", "ep", "etp", "pp")
MAX_LAYOUTS = 20
# Heading of a column -> the parts of an iteration that it shows, by how their names begin.
PARTS = {"exchange": EXCHANGE, "attention": "attention", "bubble": BUBBLE, "recompute": "recompute"}


@dataclass(frozen=True, kw_only=True)
class RankedIteration:
    """A layout with its iteration.

    Attributes:
        estimate: of this layout.
        exchange_rank: place by the time of the exchanges of an iteration, from 1.
    """

    estimate: Estimate
    exchange_rank: int


@dataclass(frozen=True, kw_only=True)
class IterationRanking:
    """Report of all layouts, the one with the shortest iteration first."""

    rows: tuple[RankedIteration, ...]

    def document(self) -> list[dict[str, Any]]:
        """The layouts for JSON; everything in it is predicted."""
        return [
            {
                **{name: getattr(row.estimate.settings, name) for name in (*SIZES, "cp")},
                "iteration_ms": row.estimate.iterations[CHOSEN].total_ms,
                "parts_ms": row.estimate.iterations[CHOSEN].parts_ms,
                "chain": row.estimate.plan.chain,
                "num_chunks": row.estimate.plan.num_chunks,
                "needed_gb": row.estimate.memory.needed_bytes / 1e9,
                "exchange_rank": row.exchange_rank,
            }
            for row in self.rows
        ]

    def text(self) -> str:
        """One line per layout."""
        best = self.rows[0].estimate
        settings = best.settings
        rows = [
            (
                *(getattr(row.estimate.settings, name) for name in SIZES),
                f"{row.estimate.iterations[CHOSEN].total_ms:,.0f}",
                *(f"{_part_ms(row.estimate, part):,.0f}" for part in PARTS.values()),
                f"{row.estimate.memory.needed_bytes / 1e9:,.0f}",
                row.exchange_rank,
            )
            for row in self.rows[:MAX_LAYOUTS]
        ]
        more = len(self.rows) - len(rows)
        times = (f">{name} ms" for name in ("total", *PARTS))
        columns = (*(f">{name.upper()}" for name in SIZES), *times, ">GB", ">place")
        texts = (
            "Predicted: total: an iteration with the planner's chain, and what its exchange, "
            "attention, bubble and recompute take of it. GB: the least that training holds on a "
            "rank. place: by the exchange alone. Name a layout (--tp --ep --etp --pp) for all "
            "parts of its iteration.",
            *(f"note: {note}" for note in best.notes),
        )
        lines = [
            *textwrap.wrap(
                f"{best.name} on {settings.world_size:,} ranks of {best.cluster.name} "
                f"({best.gpu}), {settings.global_batch_size:,} sequences of "
                f"{settings.seq_length:,} tokens",
                WIDTH,
            ),
            "",
            table(columns, rows),
            *([] if more == 0 else [f"and {more} more, all of them with --json"]),
            "",
            *(line for text in texts for line in textwrap.wrap(text, WIDTH)),
        ]
        return "\n".join(lines)


def rank_by_iteration(
    request: EstimateRequest,
    progress: Callable[[], AbstractContextManager[Progress]] = lambda: nullcontext(Progress()),
) -> IterationRanking:
    """All (TP, EP, ETP, PP) that fit, the shortest iteration with the planner's choice first.

    The global batch is the same in all of them. CP is the one given, or 1; PP is the one given, or
    any that divides the layers.

    Args:
        request: a model and a cluster, without TP, EP and ETP.
        progress: opened around the estimates, which take seconds.

    Raises:
        ValueError: a file or a size is wrong, or no layout fits.
    """
    assert request.model is not None and request.cluster is not None, "the command checks it"
    given = request.sizes
    model = load_model(request.model)
    model = with_batch(model, given.get("seq_length"), given.get("micro_batch_size"))
    cluster = load_cluster(request.cluster)
    world_size, cp = given.get("world_size", cluster.num_ranks), given.get("cp", 1)
    stages = [given["pp"]] if "pp" in given else divisors(model.num_layers)
    layouts = [layout for pp in stages for layout in layouts_of(model, cluster, world_size, cp, pp)]
    # As many sequences as fill the stages of a pipeline over all ranks.
    batch = MICRO_BATCHES_PER_STAGE * model.micro_batch_size * max(world_size // cp, 1)
    sizes = {"world_size": world_size, "cp": cp, "global_batch_size": batch, **given}
    estimates, run = list[Estimate](), None
    # Layouts that differ in their pipeline alone have the same exchange.
    price = lru_cache(maxsize=None)(price_chain)
    reason = f"none of them divides {world_size} ranks and {model.num_experts} experts"
    with progress() as shown:
        shown.phase("layouts", len(layouts))
        for layout in layouts:
            shown.step()
            of_layout = replace(
                request, sizes={**sizes, **{name: getattr(layout, name) for name in SIZES}}
            )
            try:
                run = run or read_estimated_run(replace(of_layout, ignore_memory=True))
                estimates.append(estimate_run(run, of_layout, price=price, with_ends=False))
            except ValueError as error:
                # It does not fit; others may.
                reason = str(error)
    if not estimates:
        raise ValueError(
            f"--world-size: got {world_size}, must be one that a (tp, ep, etp, pp) fits with "
            f"{model.name} on {cluster.name}; the last that was tried: {reason}"
        )
    by_exchange = sorted(_part_ms(of, EXCHANGE) for of in estimates)
    rows = (
        RankedIteration(estimate=of, exchange_rank=1 + by_exchange.index(_part_ms(of, EXCHANGE)))
        for of in sorted(estimates, key=lambda of: of.iterations[CHOSEN].total_ms)
    )
    return IterationRanking(rows=tuple(rows))


def _part_ms(of: Estimate, part: str) -> float:
    """The time of the parts whose names begin so: attention stands with its kind."""
    parts = of.iterations[CHOSEN].parts_ms
    return sum(time for name, time in parts.items() if name.startswith(part))
