"""The parts of a report, each from the numbers that its own command prints."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from monta_megatron.common import strict_yaml
from monta_megatron.common.files import read
from monta_megatron.common.units import counted, size_text
from monta_megatron.planner.chain_price import RESOURCE_NAMES
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools import pictures
from monta_megatron.tools.bench import report as bench_report
from monta_megatron.tools.bench.plots import plot_report
from monta_megatron.tools.calibrate import report as calibration_report
from monta_megatron.tools.calibrate.plots import plot_curves
from monta_megatron.tools.plan import report as plan_report
from monta_megatron.tools.plan.benefit import benefit_of_plan
from monta_megatron.tools.plan.plan_request import PlanRequest
from monta_megatron.tools.plan.request import PlanInputs, plan_request
from monta_megatron.tools.report.markup import (
    bullets,
    details,
    fields,
    heading,
    paragraph,
    picture,
    table,
)
from monta_megatron.tools.report.page import Section
from monta_megatron.tools.timeline import drawing
from monta_megatron.tools.timeline.overlap import (
    overlap_columns,
    overlap_rows,
    overlap_title,
    overlaps,
)

# Ranks in the picture of a recording.
MAX_RANKS = 2
# A row of a benchmark takes less than 1 kB.
MOST_BENCH_BYTES = 10_000_000


def plan_section(request: PlanRequest, inputs: PlanInputs) -> Section:
    """What `monta plan` says of a layout, or of the best of all that fit.

    Raises:
        ValueError: no chain can run, or the training does not fit into the memory of a rank.
    """
    plan, _, memory = plan_request(request, inputs)
    benefit = benefit_of_plan(request, inputs, plan)
    chosen = plan_report.shown_candidates(plan)
    body = [
        *([] if benefit is None else [paragraph(benefit.text, "gain")]),
        fields(plan_report.plan_fields(plan, memory)),
        heading("Every chain, in its best number of chunks"),
        table(
            ["chain", ">chunks", ">us", ">inter", ">intra", ">peak", "why"],
            (
                (
                    entry.chain,
                    entry.num_chunks,
                    None
                    if entry.predicted_us is None
                    else f"{entry.predicted_us:,.0f}{plan_report.range_text(entry.range_us)}",
                    size_text(entry.inter_bytes),
                    size_text(entry.intra_bytes),
                    size_text(entry.peak_bytes),
                    entry.rejected or "chosen",
                )
                for entry in chosen
            ),
            marked=[number for number, entry in enumerate(chosen) if entry.rejected is None],
        ),
        details(
            "the chosen chain, stage by stage",
            table(plan_report.STAGE_COLUMNS, plan_report.stage_rows(plan.stages)),
        ),
    ]
    if inputs.ranking is not None:
        rows = plan_report.layout_rows(inputs.ranking)
        body += [
            heading(f"Layouts that fit, the fastest exchange first: {len(rows)}"),
            table(plan_report.LAYOUT_COLUMNS, rows[: plan_report.MAX_LAYOUTS], marked=[0]),
        ]
    return Section(title="Plan (predicted)", body="\n".join(body))


def timeline_section(title: str, drawn: drawing.Drawing) -> Section:
    """What `monta timeline` draws and prints."""

    def draw(folder: Path) -> Iterator[Path]:
        files = drawing.write(drawn, folder, MAX_RANKS)
        yield Path(files["picture"])

    body = [paragraph(drawn.title), _pictures(draw, drawn.title)]
    for rows in map(overlaps, drawn.timelines):
        body += [heading(overlap_title(rows)), table(overlap_columns(rows), overlap_rows(rows))]
    return Section(title=title, body="\n".join(body))


def bench_section(path: Path) -> Section:
    """What `monta bench --json` has written.

    Raises:
        ValueError: the file is something else.
    """
    advice = "must be what monta bench --json printed for one point"
    report = read(path, MOST_BENCH_BYTES)
    try:
        entries, meta = report["rows"], report["meta"]
        rows = [
            strict_yaml.build(bench_report.Row, entry, f"{path}: rows[{number}]")
            for number, entry in enumerate(entries)
        ]
        parts = [_of_meta(name, meta[name]) for name in meta]
    except (KeyError, TypeError) as error:
        raise ValueError(f"--bench: {path}: {advice}") from error
    if not rows:
        raise ValueError(f"--bench: {path}: got no rows, {advice}")

    def draw(folder: Path) -> Iterator[Path]:
        try:
            yield from plot_report(report, folder)
        except (KeyError, TypeError) as error:
            raise ValueError(f"--bench: {path}: meta: {advice}") from error

    body = [fields(parts), _pictures(draw, "times of every chain, and of stock")]
    for scope, phase in dict.fromkeys((row.scope, row.phase) for row in rows):
        shown = [row for row in rows if (row.scope, row.phase) == (scope, phase)]
        body += [
            heading(f"{scope}, {phase.replace('_', ' + ')} (payload in MB)"),
            table(
                bench_report.COLUMNS,
                map(bench_report.cells, shown),
                marked=[number for number, row in enumerate(shown) if row.chosen],
            ),
        ]
    predicted = bench_report.prediction_rows(rows)
    if predicted:
        body += [
            heading("Predicted from the cluster file"),
            table(bench_report.PREDICTION_COLUMNS, predicted),
        ]
    return Section(title="Benchmark (measured)", body="\n".join(body))


def calibration_section(cluster: Cluster) -> Section:
    """How well the costs of a cluster are known."""
    body = [
        fields(
            [
                ("cluster", cluster.name),
                ("kind", cluster.kind),
                ("source", cluster.source),
                (
                    "size",
                    f"{counted(cluster.num_nodes, 'node')} of "
                    f"{counted(cluster.ranks_per_node, 'rank')}, "
                    f"{counted(cluster.nics_per_node, 'network interface')} each",
                ),
                ("quality", _quality(cluster)),
            ]
        )
    ]
    if cluster.doubts:
        body += [heading("Doubts"), bullets(cluster.doubts)]
    if cluster.links:
        body += [
            heading("Resources without curves: straight lines"),
            table(
                ["resource", ">start us", ">GB/s", "kind", "source"],
                (
                    (
                        RESOURCE_NAMES[link.resource],
                        f"{link.alpha_us:.1f}",
                        f"{link.rate.gbytes_per_s:,.4g}",
                        link.kind,
                        link.source,
                    )
                    for link in cluster.links
                ),
            ),
        ]
    if cluster.curves:

        def draw(folder: Path) -> Iterator[Path]:
            yield plot_curves(cluster, folder)

        body += [
            heading("Curves, and the line through each"),
            table(calibration_report.COLUMNS, map(calibration_report.cells, cluster.curves)),
            _pictures(draw, "time against bytes of every curve"),
        ]
    if cluster.contention:
        body += [
            heading("Beside another operation, an operation takes"),
            table(
                ["operation on", "beside one on", ">times as long"],
                (
                    (
                        RESOURCE_NAMES[here],
                        RESOURCE_NAMES[there],
                        f"{cluster.factor(here, there):.2f}",
                    )
                    for entry in cluster.contention
                    for here, there in (entry.pair, entry.pair[::-1])
                ),
            ),
        ]
    return Section(title="Calibration", body="\n".join(body))


def _quality(cluster: Cluster) -> str:
    """In a line: what was measured, and how far it is off its lines."""
    if not cluster.curves:
        return "not calibrated: published figures; monta calibrate measures this cluster's own"
    off = [curve.fit.largest_residual for curve in cluster.curves if curve.fit is not None]
    text = counted(len(cluster.curves), "curve")
    if off:
        text += f", off their lines by {median(off):.0%} in the median and {max(off):.0%} at most"
    return f"{text}; {counted(len(cluster.doubts), 'doubt')}"


def _of_meta(name: str, value: Any) -> tuple[str, str]:
    """A field of a benchmark's `meta` as a name and a text."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{_words(key)} {_shown(part)}" for key, part in value.items())
    return _words(name), _shown(value)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _pictures(draw: Callable[[Path], Iterator[Path]], describes: str) -> str:
    """What is drawn in a folder, as part of the page; without matplotlib, how to get it."""
    if not pictures.can_draw():
        return paragraph(f"no picture without matplotlib: {pictures.INSTALL}", "quiet")
    with tempfile.TemporaryDirectory() as folder:
        return "\n".join(picture(path.read_bytes(), describes) for path in draw(Path(folder)))
