"""Hold the predictions of `monta estimate` against published figures.

    python benchmarks/validate.py
    python benchmarks/validate.py --set overlap_share=0.8 --json

Published iterations, MoE layers and bandwidths, and exchanges that were measured on the emulated
cluster, are predicted; predicted, published and error of each are printed. The figures are in
configs/estimate/published.yaml, with their sources. Constants were fitted on the rows marked so,
and on no others. The exit status is 1 where a row is past its tolerance.
"""

import argparse
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import published_rows as rows

from monta_megatron.chains import CHAINS
from monta_megatron.cli import main
from monta_megatron.cli.estimate import add_set
from monta_megatron.cli.parser import Parser, add_json
from monta_megatron.common import presets, strict_yaml
from monta_megatron.common.tables import print_json, table
from monta_megatron.planner.assumptions import (
    Assumption,
    Assumptions,
    assumptions_of,
    gpu_of,
)
from monta_megatron.planner.chain_price import price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.flex import FlexExchange, flex_pass_us
from monta_megatron.planner.layout import ParallelLayout, exchanges
from monta_megatron.planner.routing.expected import UniformRouting
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.estimate.exchange import exchange_time
from monta_megatron.tools.estimate.iteration import Iteration, estimate_iteration, moe_layer
from monta_megatron.tools.estimate.layers import (
    Architecture,
    Dispatcher,
    TrainingSettings,
    architecture_of,
)
from monta_megatron.tools.launch.prepare import read_run

WIDTH = 80
PAST_TOLERANCE = 1
# Of the benchmark on the emulated cluster, in fp32.
EXPERTS_OF_EMULATION = 64
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One row with its prediction.

    Attributes:
        id, family, source, published, unit, tolerance_pct, judged: of the row.
        kind: iteration, layer, bandwidth or exchange.
        predicted: in the same unit.
    """

    id: str
    family: str
    kind: str
    source: str
    predicted: float
    published: float
    unit: str
    tolerance_pct: float
    judged: bool

    @property
    def error_pct(self) -> float:
        """Of the published figure; above 0 where too much is predicted."""
        return 100 * (self.predicted - self.published) / abs(self.published)

    @property
    def within(self) -> bool:
        """Whether the tolerance holds."""
        return abs(self.error_pct) <= self.tolerance_pct


@dataclass(frozen=True)
class Predictor:
    """Predicts rows by one set of constants.

    Attributes:
        changes: name -> value, in place of the file's.
        entries: all constants; None for the file's.
    """

    changes: Mapping[str, float]
    entries: Sequence[Assumption] | None = None

    def all_rows(self, judged: bool | None = None) -> list[Checked]:
        """Every row, or those that judge, or those that do not."""
        published = rows.read_published()
        families: list[tuple[str, rows.Family, Callable[..., Iterator[tuple[Any, float, str]]]]] = [
            *(("iteration", family, self._iterations) for family in published.iterations),
            *(("layer", family, self._layers) for family in published.layers),
            *(("bandwidth", family, self._bandwidths) for family in published.bandwidths),
            *(("exchange", family, self._exchanges) for family in published.exchanges),
        ]
        return [
            Checked(
                id=row.id,
                family=family.family,
                kind=kind,
                source=family.source,
                predicted=predicted,
                published=row.published,
                unit=unit,
                tolerance_pct=family.tolerance_pct,
                judged=family.judged,
            )
            for kind, family, predict in families
            if judged in (None, family.judged)
            for row, predicted, unit in predict(family)
        ]

    def _assumed(self, gpu: str, cluster: Cluster) -> Assumptions:
        return assumptions_of(gpu, cluster.name, self.changes, self.entries)

    def _iterations(self, family: rows.IterationFamily) -> Iterator[tuple[rows.Row, float, str]]:
        model = changed_architecture(family.model, family.changes)
        cluster = cluster_of(family.cluster)
        assumed = self._assumed(family.gpu, cluster)
        for row in family.rows:
            given = {**family.settings, **row.settings}
            settings = strict_yaml.build(TrainingSettings, given, f"{rows.FILE}: {row.id}")
            iteration = estimate_iteration(model, settings, cluster, assumed)
            yield row, in_unit(iteration, family.unit), family.unit

    def _layers(self, family: rows.LayerFamily) -> Iterator[tuple[rows.Row, float, str]]:
        cluster, layer = cluster_of(family.cluster), family.layer
        assumed = self._assumed(family.gpu, cluster)
        model = _layer_architecture(layer)
        settings = TrainingSettings(
            world_size=layer.ep,
            ep=layer.ep,
            seq_length=layer.tokens_per_rank,
            global_batch_size=layer.ep,
        )
        dispatchers: tuple[Dispatcher, ...] = ("alltoall", *(row.dispatcher for row in family.rows))
        times = {
            dispatcher: moe_layer(
                model,
                settings,
                cluster,
                assumed,
                exchange_time(model, replace(settings, dispatcher=dispatcher), cluster, assumed),
            ).gpu_us
            for dispatcher in dispatchers
        }
        for row in family.rows:
            yield row, (times["alltoall"] - times[row.dispatcher]) / 1e3, "ms saved"

    def _bandwidths(self, family: rows.BandwidthFamily) -> Iterator[tuple[rows.Row, float, str]]:
        cluster, moved = cluster_of(family.cluster), family.exchange
        assumed = self._assumed(gpu_of(cluster.name, None), cluster)
        for row in family.rows:
            exchange = FlexExchange(
                routing=UniformRouting(
                    num_experts=moved.num_experts or moved.experts_per_rank * row.ranks,
                    topk=moved.router_topk,
                    num_groups=moved.router_num_groups,
                    group_topk=moved.router_group_topk,
                ),
                tokens_per_rank=moved.tokens_per_rank,
                row_bytes=moved.hidden_size * row.value_bytes,
                ep=row.ranks,
                ranks_per_node=cluster.ranks_per_node,
            )
            time_us = flex_pass_us(exchange, cluster, family.backend, assumed)
            yield row, exchange.printed_bytes / time_us / 1e3, "GB/s"

    def _exchanges(self, family: rows.ExchangeFamily) -> Iterator[tuple[rows.Row, float, str]]:
        cluster = cluster_of(family.cluster)
        for row in family.rows:
            moved = row.exchange
            layout = ParallelLayout(world_size=cluster.num_ranks, ep=moved.ep, etp=moved.etp)
            workload = Workload(
                layout=exchanges(layout, EXPERTS_OF_EMULATION, cluster.ranks_per_node)[0],
                hidden_size=moved.hidden_size,
                value_bytes=FP32_BYTES,
                prob_bytes=FP32_BYTES,
                routing=UniformRouting(num_experts=EXPERTS_OF_EMULATION, topk=moved.router_topk),
                tokens_per_rank=moved.tokens_per_rank,
            )
            price = price_chain(
                workload, cluster, CHAINS[row.chain], row.num_chunks, "forward_backward"
            )
            yield row, price.total_us / 1e3, "ms"


def median_error_pct(checked: Iterable[Checked]) -> float:
    """Without sign."""
    return statistics.median(abs(row.error_pct) for row in checked)


def document(checked: Sequence[Checked]) -> dict[str, Any]:
    """The JSON document."""
    judged = [row for row in checked if row.judged]
    return {
        "rows": [
            {**asdict(row), "error_pct": row.error_pct, "within": row.within} for row in checked
        ],
        "judged_median_error_pct": median_error_pct(judged),
        "past_tolerance": [row.id for row in checked if not row.within],
    }


def in_unit(iteration: Iteration, unit: str) -> float:
    """An iteration as the source prints it."""
    return {
        "s": iteration.total_ms / 1e3,
        "ms": iteration.total_ms,
        "TFLOP/s per GPU": iteration.tflops_per_gpu,
        "tokens/s per GPU": iteration.tokens_per_s_per_gpu,
    }[unit]


def changed_architecture(run: str, changes: Mapping[str, Any]) -> Architecture:
    """The architecture of a run preset, with some fields in place of its own."""
    architecture = _architecture(run)
    given = {**strict_yaml.plain(architecture), **changes}
    return strict_yaml.build(Architecture, given, str(rows.FILE))


@cache
def _architecture(run: str) -> Architecture:
    file = str(presets.find("runs", run))
    return architecture_of(read_run(file, [])[1].arguments, file)


@cache
def cluster_of(name: str) -> Cluster:
    """A preset, or a calibration that lies beside the rows."""
    beside = Path(rows.FILE).with_name(f"{name}.yaml")
    return load_cluster(beside if beside.is_file() else name)


def _layer_architecture(layer: rows.Layer) -> Architecture:
    """A model of one layer; its attention is the same with every dispatcher."""
    return Architecture(
        num_layers=1,
        hidden_size=layer.hidden_size,
        num_attention_heads=8,
        num_query_groups=8,
        head_dim=layer.hidden_size // 8,
        num_experts=layer.num_experts,
        router_topk=layer.router_topk,
        router_num_groups=layer.router_num_groups,
        router_group_topk=layer.router_group_topk,
        expert_ffn_size=layer.expert_ffn_size,
        dense_ffn_size=layer.expert_ffn_size,
        vocab_size=1,
    )


def validation_lines(rows: Sequence[Checked]) -> list[str]:
    """Every row, and what the judged ones come to."""
    lines = []
    for judged, title in ((False, "fitted row"), (True, "judged row")):
        cells = [
            (
                row.id,
                f"{row.predicted:,.2f}",
                f"{row.published:,.2f}",
                row.unit,
                f"{row.error_pct:+.1f}%",
                "" if row.within else f"past {row.tolerance_pct:g}%",
            )
            for row in rows
            if row.judged is judged
        ]
        columns = (title, ">predicted", ">published", "unit", ">error", "")
        lines += [table(columns, cells), ""]
    return [*lines, *summary_lines(rows)]


def summary_lines(rows: Sequence[Checked]) -> list[str]:
    """The judged rows in numbers, all and by kind, and which rows are past their tolerance."""
    judged = [row for row in rows if row.judged]
    lines = []
    for kind in (None, *dict.fromkeys(row.kind for row in judged)):
        of_kind = [row for row in judged if kind in (None, row.kind)]
        past = sum(not row.within for row in of_kind)
        lines.append(
            f"{kind or 'all'}: {len(of_kind)} judged rows, median error "
            f"{median_error_pct(of_kind):.1f}%, {past} past the tolerance"
        )
    missed = [f"{row.id} ({row.error_pct:+.1f}%)" for row in rows if not row.within]
    if missed:
        lines += textwrap.wrap(f"missed: {', '.join(missed)}", WIDTH)
    return lines


def parser() -> argparse.ArgumentParser:
    """The flags of this script."""
    flags = Parser(prog="validate.py", description=__doc__)
    add_set(flags)
    add_json(flags)
    flags.set_defaults(command="validate", run=run)
    return flags


def run(parsed: argparse.Namespace) -> int:
    """Print every row."""
    checked = Predictor(dict(parsed.set)).all_rows()
    if parsed.json:
        print_json(document(checked))
    else:
        print("\n".join(validation_lines(checked)))
    return 0 if all(row.within for row in checked) else PAST_TOLERANCE


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
