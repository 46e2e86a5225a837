"""One HTML page of a run: sections from the numbers of each command. It loads nothing.

All text is escaped where the pieces of the page are made, and only there.
"""

import base64
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from monta_megatron.common import strict_yaml
from monta_megatron.common.files import read, write_whole
from monta_megatron.common.presets import versions
from monta_megatron.common.units import counted, size_text
from monta_megatron.planner.chain_price import RESOURCE_NAMES
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.tools import pictures
from monta_megatron.tools.bench import report as bench_report
from monta_megatron.tools.bench.report import plot_report
from monta_megatron.tools.calibrate import report as calibration_report
from monta_megatron.tools.calibrate.report import plot_curves
from monta_megatron.tools.plan import report as plan_report
from monta_megatron.tools.plan.request import PlanInputs, PlanRequest, benefit_of_plan, plan_request
from monta_megatron.tools.timeline import drawing
from monta_megatron.tools.timeline.spans import (
    overlap_columns,
    overlap_rows,
    overlap_title,
    overlaps,
)


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; `kind` is a class of the page's style."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """A heading inside a section."""
    return f"<h3>{escape(text)}</h3>"


def bullets(texts: Iterable[str]) -> str:
    """A list."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values; pairs with the same name follow each other below it."""
    rows, last = [], None
    for name, text in pairs:
        shown = "" if name == last else escape(name)
        rows.append(f"<dt>{shown}</dt><dd>{escape(text)}</dd>")
        last = name
    return f"<dl>{''.join(rows)}</dl>"


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], marked: Collection[int] = ()
) -> str:
    """A table; the arguments are those of `common.tables.table`.

    Args:
        columns: the headings; one that begins with ">" aligns its column right.
        rows: a cell for each column: any object, None for "-".
        marked: numbers of the rows to set apart from the others.
    """
    kinds = [' class="number"' if column.startswith(">") else "" for column in columns]

    def line(tag: str, cells: Iterable[str]) -> str:
        return "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )

    head = line("th", (column.removeprefix(">") for column in columns))
    body = "".join(
        f"<tr{' class=marked' if number in marked else ''}>"
        f"{line('td', ('-' if cell is None else str(cell) for cell in row))}</tr>"
        for number, row in enumerate(rows)
    )
    wide = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    # A wide table scrolls by itself on a narrow screen.
    return f'<div class="scrolls">{wide}</div>'


def details(summary: str, content: str) -> str:
    """Folded section; `content` is HTML."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def picture(png: bytes, describes: str) -> str:
    """A picture that is part of the page."""
    data = base64.b64encode(png).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(describes)}">'


# The policy makes a browser refuse whatever is not part of the page itself.
_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark; --text: #1f2328; --quiet: #59636e; --back: #ffffff;
  --raised: #f6f8fa; --line: #d1d9e0; --mark: #fff1e5; --accent: #b35900; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --quiet: #9198a1; --back: #0d1117; --raised: #151b23;
    --line: #3d444d; --mark: #33210f; --accent: #f0a35e; } }
body { margin: 0 auto; padding: 1.5rem 1.25rem 3rem; max-width: 60rem; color: var(--text);
  background: var(--back); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
.quiet, summary { color: var(--quiet); font-size: .9rem; }
.gain { font-size: 1.15rem; font-weight: 600; color: var(--accent); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.25rem; margin: 0; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
.scrolls { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { background: var(--raised); font-weight: 600; white-space: nowrap; }
td:last-child:not(.number) { min-width: 14rem; }
.number { text-align: right; white-space: nowrap; }
tr.marked td { background: var(--mark); font-weight: 600; }
img { display: block; max-width: 100%; box-sizing: border-box; margin: .75rem 0; padding: .5rem;
  background: #ffffff; border: 1px solid var(--line); border-radius: 6px; }
details { margin: .75rem 0; }
summary { cursor: pointer; }
</style>
</head>
<body>
<h1>$title</h1>
$head
$sections
$foot
</body>
</html>
""")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        body: its HTML, from `markup`.
    """

    title: str
    body: str


# Part -> what gives it.
PARTS = {
    "plan": "--model and --cluster",
    "timeline": "--model and --cluster",
    "recorded timeline": "--recording PATH, of a run or a training",
    "benchmark": "--bench FILE, of monta bench --json",
    "calibration": "--cluster FILE",
}


@dataclass(frozen=True, kw_only=True)
class PageRequest:
    """A page to write, from what there is.

    Attributes:
        out: the page.
        title: of it; None for one by its plan.
        plan: request and inputs of a plan.
        recording: of a timeline.
        stock: the recording's counterpart with alltoall.
        bench: what `monta bench --json` printed.
        cluster: a cluster file, or a preset.
    """

    out: Path
    title: str | None
    plan: tuple[PlanRequest, PlanInputs] | None
    recording: Path | None
    stock: Path | None
    bench: Path | None
    cluster: str | None

    def sections(self) -> dict[str, Section]:
        """Parts of `PARTS` that are given, in that order."""
        sections = dict[str, Section]()
        if self.plan is not None:
            sections["plan"] = plan_section(*self.plan)
            predicted = drawing.of_prediction(*self.plan)
            sections["timeline"] = timeline_section("Timeline (predicted)", predicted)
        if self.recording is not None:
            recorded = drawing.of_path(self.recording, stock=self.stock)
            sections["recorded timeline"] = timeline_section("Timeline (recorded)", recorded)
        if self.bench is not None:
            sections["benchmark"] = bench_section(self.bench)
        if self.cluster is not None:
            sections["calibration"] = calibration_section(load_cluster(self.cluster))
        return sections


@dataclass(frozen=True, kw_only=True)
class PageReport:
    """Result of `monta report`.

    Attributes:
        out: the page.
        parts: that it has.
    """

    out: Path
    parts: list[str]

    @property
    def left_out(self) -> dict[str, str]:
        """The other parts, and what gives them."""
        return {part: flags for part, flags in PARTS.items() if part not in self.parts}

    @property
    def notes(self) -> list[str]:
        """The same as lines."""
        return [f"{part}: {flags}" for part, flags in self.left_out.items()]

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {"out": str(self.out), "parts": self.parts, "left_out": list(self.left_out)}

    def text(self) -> str:
        """The parts, and what would give the others."""
        left_out = (f"left out {note}" for note in self.notes)
        return "\n".join([f"wrote {self.out}: {', '.join(self.parts)}", *left_out])


def write_page(request: PageRequest) -> PageReport:
    """Write the page.

    Raises:
        ValueError: one line: a file or value is wrong.
    """
    sections = request.sections()
    name = "monta"
    if request.plan is not None:
        _, inputs = request.plan
        name = f"{inputs.model.name} on {inputs.cluster.name}"
    title = request.title or name
    report = PageReport(out=request.out, parts=list(sections))
    write_whole(request.out, page(title, list(sections.values()), report.notes))
    return report


def page(title: str, sections: Sequence[Section], left_out: Sequence[str]) -> str:
    """The HTML document.

    Args:
        title: of the page.
        sections: its parts, in order.
        left_out: which parts are not there, and what would give them.
    """
    of = versions()
    made = f"monta-megatron {of['monta-megatron'] or 'from a checkout'}, Python {of['python']}"
    foot = heading("Left out") + bullets(left_out) if left_out else ""
    return _PAGE.substitute(
        title=escape(title),
        head=paragraph(f"made by monta report; {made}", "quiet"),
        sections="\n".join(
            f"<section><h2>{escape(section.title)}</h2>\n{section.body}\n</section>"
            for section in sections
        ),
        foot=foot,
    )


# Ranks in the picture of a recording.
MAX_RANKS = 2
# A row of a benchmark takes less than 1 kB.
MOST_BENCH_BYTES = 10_000_000


def plan_section(request: PlanRequest, inputs: PlanInputs) -> Section:
    """Section of `monta plan`: a layout, or the best of all that fit.

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
    """Section of `monta timeline`: picture and text."""

    def draw(folder: Path) -> Iterator[Path]:
        files = drawing.write(drawn, folder, MAX_RANKS).files
        yield Path(files["picture"])

    body = [paragraph(drawn.title), _pictures(draw, drawn.title)]
    for rows in map(overlaps, drawn.timelines):
        body += [heading(overlap_title(rows)), table(overlap_columns(rows), overlap_rows(rows))]
    return Section(title=title, body="\n".join(body))


def bench_section(path: Path) -> Section:
    """Section of `monta bench --json`.

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
    """Quality of a cluster's costs."""
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
    """Measurements and their distance from the fitted lines, in a line."""
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
    """Pictures of a folder as part of the page; without matplotlib, how to get it."""
    if not pictures.can_draw():
        return paragraph(f"no picture without matplotlib: {pictures.INSTALL}", "quiet")
    with tempfile.TemporaryDirectory() as folder:
        return "\n".join(picture(path.read_bytes(), describes) for path in draw(Path(folder)))
