"""`monta report`: one page that loads nothing, whatever is written in the files that it shows."""

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from monta_megatron.cli import main
from monta_megatron.common import strict_yaml
from monta_megatron.common.units import Rate
from monta_megatron.planner.cluster import Contention
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.curves import Curve, Fit
from monta_megatron.tools import pictures
from monta_megatron.tools.bench.report import Row

MODEL = [
    *("--model", "qwen3_235b_a22b", "--cluster", "h100_8x_ndr"),
    *("--world-size", "128", "--tp", "2", "--ep", "16", "--pp", "4"),
]
HOSTILE = '"><script src="https://example.org/x.js">&amp;'
# All that the page may consist of; none of them loads or runs anything but a picture.
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "section", "h1", "h2", "h3", "p", "ul"),
    *("li", "dl", "dt", "dd", "div", "table", "thead", "tbody", "tr", "th", "td", "img"),
    *("details", "summary"),
}
ATTRIBUTES = {
    *("lang", "charset", "name", "content", "http-equiv", "class", "src", "alt"),
}

CURVE = Curve(
    operation="copy",
    resource="memory",
    group_size=1,
    sizes_bytes=(1000, 2000),
    times_us=(1.0, 2.0),
    kind="measured",
    source="by hand",
    fit=Fit(alpha_us=0.0, rate=Rate(1.0), largest_residual=0.05),
)


class Page(HTMLParser):
    """What a browser sees."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = ""
        self.sources: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS and {name for name, _ in attrs} <= ATTRIBUTES
        self.sources += [value or "" for name, value in attrs if name == "src"]

    def handle_data(self, data: str) -> None:
        self.text += data


def row(chain: str, median_ms: float, **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "dispatcher": "monta",
        "chain": chain,
        "num_chunks": 1,
        "requested": chain,
        "scope": "exchange",
        "phase": "forward",
        "tokens": 64,
        "top_k": 2,
        "routing": "uniform",
        "experts": 8,
        "hidden": 32,
        "dtype": "float32",
        "tp": 1,
        "ep": 4,
        "etp": 1,
        "inter_mbit": None,
        "median_ms": median_ms,
        "p10_ms": median_ms,
        "p90_ms": median_ms,
        "inter_bytes": 1000,
        "intra_bytes": 1000,
        "nic_bytes": None,
        "pct_of_limit": None,
        "ratio_to_alltoall": 20 / median_ms,
        "ratio_low": 1.0,
        "ratio_high": 2.0,
    }
    return asdict(Row(**{**fields, **more}))


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """What `monta bench --json` prints, by someone who means harm."""
    layout = {"world_size": 4, "nodes": 2, "ranks_per_node": 2, "tp": 1, "ep": 4, "etp": 1}
    layer = {"experts": 8, "top_k": 2, "hidden": 32, "tokens": 64, "dtype": "float32"}
    report = {
        "meta": {
            "versions": {"python": "3.12", "torch": None},
            "machine": {"processor": HOSTILE, "cores": 2, "gpu": None},
            "command": HOSTILE,
            "layout": layout,
            "layer": {**layer, "routing": "uniform"},
            "emulated_cluster": None,
        },
        "rows": [
            row("alltoall", 20.0, dispatcher="megatron"),
            row("allgather", 10.0, chosen=True, predicted_ms=9.0),
        ],
    }
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(report))
    return path


def test_a_page_of_all_parts_loads_nothing(
    bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated = replace(
        load_cluster("a800_2x8_ib200"),
        name=HOSTILE,
        doubts=(HOSTILE,),
        curves=(CURVE,),
        contention=(Contention(pair=("inter", "intra"), factor=1.5, kind="measured", source="x"),),
    )
    cluster = tmp_path / "cluster.yaml"
    # JSON is YAML.
    cluster.write_text(json.dumps(strict_yaml.plain(calibrated)))
    out = tmp_path / "report.html"
    model = [*MODEL[:2], "--cluster", str(cluster), "--ep", "16", "--ignore-memory"]
    arguments = ["--out", str(out), *model, "--bench", str(bench), "--title", HOSTILE]
    assert main(["report", *arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["parts"] == ["plan", "timeline", "benchmark", "calibration"]
    assert document["left_out"] == ["recorded timeline"]

    page = Page(out)
    assert len(page.sources) >= 2
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    (style,) = re.findall("<style>(.*?)</style>", out.read_text(), flags=re.S)
    assert "url" not in style and "@import" not in style
    assert "default-src 'none'" in out.read_text()
    # Titles, command, processor, cluster and doubt, as they were written.
    assert page.text.count(HOSTILE) >= 6
    for words in (
        *("x stock alltoall", "stage by stage", "allgather x1 *", "-10%", "Left out"),
        *("recorded timeline: --recording", "off their lines by 5%", "1 doubt", "times as long"),
    ):
        assert words in page.text, words


def test_parts_that_are_not_given_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    assert main(["report", "--out", str(out), "--cluster", "h100_8x_ndr"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"wrote {out}: calibration\n") and "left out benchmark: --bench" in text
    page = Page(out)
    assert "not calibrated: published figures" in page.text
    assert "plan: --model and --cluster" in page.text and not page.sources


def test_without_matplotlib_the_page_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    out = tmp_path / "report.html"
    assert main(["report", "--out", str(out), *MODEL]) == 0
    page = Page(out)
    assert "no picture without matplotlib: pip install matplotlib" in page.text
    assert "2.11x stock alltoall" in page.text and not page.sources
    # Of each chain, as in the line of the choice: likely, from the least to the most.
    assert len(re.findall(r"[\d,]+ \([\d,]+ to [\d,]+\)", page.text)) == 1 + 6


def test_bad_input_is_one_line_and_leaves_no_page(
    bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    report = json.loads(bench.read_text())
    half, foreign, wrong, empty, none = (tmp_path / f"{name}.json" for name in "abcde")
    none.write_text(json.dumps({**report, "rows": []}))
    half.write_text(bench.read_text()[:-20])
    foreign.write_text('["plan"]')
    wrong.write_text(json.dumps({**report, "rows": [{**report["rows"][0], "tokens": "many"}]}))
    empty.write_text(json.dumps({**report, "meta": {}}))
    for arguments, words in (
        ([], "--model, --cluster, --recording, --bench: none given"),
        (["--bench", str(tmp_path / "nowhere")], "cannot be read: No such file"),
        (["--bench", str(half)], "is no JSON in line 1"),
        (["--bench", str(none)], "got no rows, must be what monta bench --json printed"),
        (["--bench", str(foreign)], "must be what monta bench --json printed"),
        (["--bench", str(wrong)], "rows[0]: tokens: got 'many', must be"),
        (["--bench", str(empty)], "must be what monta bench --json printed"),
        (["--model", "qwen3_235b_a22b"], "--cluster: not given, must be with --model"),
        (["--cluster", "h100_8x_ndr", "--ep", "8"], "--ep: got 8, must come with --model"),
        (["--bench", str(bench), "--stock", "there"], "--stock: got there, must come with --rec"),
        (["--recording", str(tmp_path / "gone")], "gone: cannot be read"),
        (["--cluster", "h100"], "h100"),
    ):
        assert main(["report", "--out", str(out), *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("monta report: ") and words in line, line
        assert not out.exists()
    out.write_text("mine")
    assert main(["report", "--out", str(out), "--bench", str(bench)]) == 2
    assert "must not exist; --force overwrites it" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_what_is_read_is_not_overwritten(
    bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bench.read_text()
    link = tmp_path / "page.html"
    link.symlink_to(bench)
    for out, words in ((bench, "another file than --bench"), (link, "another file than --bench")):
        assert main(["report", "--out", str(out), "--bench", str(bench), "--force"]) == 2
        assert words in capsys.readouterr().err
    assert main(["report", "--out", str(tmp_path), "--bench", str(bench), "--force"]) == 2
    assert "must be a file" in capsys.readouterr().err
    assert bench.read_text() == before


def test_a_title_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["report", "--out", str(tmp_path / "page.html"), "--title", "one\ntwo"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "--title" in line and "one line of printable characters" in line
