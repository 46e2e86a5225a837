"""Sweeps: their files, how they go on after a kill, and what their summary says."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
from interrupts import started, wait_for
from summary import measured_points, summarise, summary_text
from sweep import check_can_plot, is_measured, read_reports, read_sweep
from test_bench_numbers import BASE
from test_bench_numbers import row as bench_row

from monta_megatron.common import strict_yaml
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.tools import pictures
from monta_megatron.tools.bench.report import Row
from monta_megatron.tools.bench.settings import parse_settings

CONFIGS = Path(__file__).parents[2] / "configs"
SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "sweep.py")
HEADLINE = "headline: {experts: 8, top-k: 2, hidden: 16, tokens: 4, num-chunks: [1, 3]}\n"
# Seconds; a launch takes 20 where nothing else runs.
LIMIT_S = 240


def sweep_file(folder: Path, points: str, headline: str = HEADLINE) -> str:
    path = folder / "sweep.yaml"
    path.write_text(f"{headline}points: {points}\n")
    return str(path)


def test_points_change_the_headline_and_flags_too(tmp_path: Path) -> None:
    path = sweep_file(tmp_path, "[{}, {tokens: 8, hidden: 32}, {tp: 2}]")
    points = read_sweep(path, {"repeats": "15", "tokens": "6", "dtype": None, "layer": False}, 4)
    assert [point.name for point in points] == ["headline", "tokens 8, hidden 32", "tp 2"]
    first, second, third = (point.settings for point in points)
    assert [(first.tokens, first.hidden), (second.tokens, second.hidden)] == [(6, 16), (8, 32)]
    assert (third.tokens, third.hidden, third.tp, third.ep, third.etp) == (6, 16, 2, 2, 2)
    assert (first.tp, first.ep, first.etp) == (second.tp, second.ep, second.etp) == (1, 4, 1)
    assert first.repeats == second.repeats == third.repeats == 15
    assert first.num_chunks == second.num_chunks == third.num_chunks == (1, 3)


def test_without_matplotlib_the_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    check_can_plot(None)
    with pytest.raises(ValueError, match=r"--plot: needs matplotlib: pip install matplotlib$"):
        check_can_plot(str(tmp_path / "plots"))
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("[]", "points: must be a list of at least one mapping"),
        ("[{topk: 3}]", "points[0]: topk: unknown flag; did you mean top-k?"),
        ("[{}, {top-k: 9}]", "points[1]: --top-k: got 9, must be at most --experts (8)"),
        ("[{}]\ntop: {}", "must be a mapping with the keys headline, points"),
    ],
)
def test_bad_sweep_files_are_one_line(tmp_path: Path, points: str, message: str) -> None:
    path = sweep_file(tmp_path, points)
    line = golden.refusal(read_sweep, path, {}, 4)
    assert line.startswith(f"{path}: {message}") and "\n" not in line


def row(dispatcher: str, chain: str, ms: float, **changes: Any) -> Row:
    values: dict[str, Any] = {
        **{"dispatcher": dispatcher, "chain": chain, "num_chunks": 1, "pct_of_limit": None},
        **dict.fromkeys(("median_ms", "p10_ms", "p90_ms"), ms),
        "ratio_to_alltoall": 1.0,
    }
    return bench_row(**{**values, **changes})


def report(*rows: Row, tokens: int = 512) -> dict[str, Any]:
    """As a line of results, with what the summary reads."""
    sizes = {"experts": 64, "hidden": 1024, "tokens": tokens, "dtype": "float32"}
    return {
        "meta": {
            "versions": {"torch": "2", "megatron-core": "0.19"},
            "machine": {"gpu": None, "processor": "a processor", "cores": 2},
            "commit": "abc",
            "settings": {**sizes, "cluster": "c.yaml", "repeats": 15},
            "inter_rate_ratio": 1.0,
            "nodes": [0, 0, 1, 1],
        },
        "rows": [{**vars(row), "tokens": tokens} for row in rows],
    }


# The pick takes 110 ms, the fastest 100 ms: regret 1.1. Predictions are 30%, 10% and 10% off.
REGRETTED = report(
    row("megatron", "alltoall", 400.0),
    row("monta", "alltoall", 400.0, predicted_ms=520.0),
    row("monta", "alltoall_dedup", 100.0, predicted_ms=110.0),
    row("monta", "hierarchical_alltoall", 112.0, predicted_ms=99.0),
    row("monta", "hierarchical_alltoall", 108.0, predicted_ms=99.0, chosen=True),
)
# Here plain alltoall was picked and is the fastest, but slower than stock's.
SLOWER = report(
    row("megatron", "alltoall", 95.0),
    row("monta", "alltoall_dedup", 150.0, predicted_ms=150.0),
    row("monta", "alltoall", 100.0, chosen=True, predicted_ms=100.0, ratio_to_alltoall=0.95),
    tokens=128,
)


def test_summary_of_hand_made_points() -> None:
    figures = summarise(measured_points([REGRETTED, SLOWER]))
    assert figures["regret_points"] == 2
    assert figures["regret_median"] == pytest.approx(1.05)
    assert figures["regret_worst"] == pytest.approx(1.1)
    # 30%, 10%, 10%, 0% and 0%.
    assert figures["predictions"] == 5
    assert figures["error_median"] == pytest.approx(0.1)
    assert figures["error_largest"] == pytest.approx(0.3)
    assert (figures["auto_points"], figures["auto_lost"]) == (2, 1)
    assert (figures["auto_alltoall_points"], figures["auto_alltoall_ratio_median"]) == (1, 0.95)
    text = summary_text([REGRETTED, SLOWER])
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert rows[2] == [
        *("512", "hierarchical_alltoall x1", "400.0", "108.0", "1.00", "108.0 to 108.0"),
        *("alltoall_dedup x1", "1.100", "15"),
    ]
    assert [row[:4] for row in rows[6:]] == [
        ["512", "+30%", "-", "-"],
        ["128", "+0%", "-", "-"],
    ]


def test_without_an_alternative_there_is_nothing_to_regret() -> None:
    plain = report(row("megatron", "alltoall", 4.0), row("monta", "alltoall", 4.0, chosen=True))
    assert summarise(measured_points([plain]))["regret_points"] == 0
    assert "Regret" not in summary_text([plain])


def test_results_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for text in ('{"rows": []}', "nothing"):
        path.write_text(f"{text}\n")
        line = golden.refusal(read_reports, path)
        assert line == f"{path}: line 1 is no report of monta bench"


def test_a_point_is_measured_with_the_same_settings_and_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = parse_settings(BASE, 4)
    emulated = EmulatedCluster(nodes=2, ranks_per_node=2, inter_mbit=500)
    meta = {
        "settings": strict_yaml.plain(settings),
        "emulated_cluster": vars(emulated),
        "inter_rate_ratio": 1.0,
    }
    reports = [{"meta": meta, "rows": []}]

    def emulate(cluster: EmulatedCluster | None) -> None:
        monkeypatch.setattr(EmulatedCluster, "from_environment", lambda: cluster)

    emulate(emulated)
    assert is_measured(reports, settings)
    assert not is_measured(reports, settings, inter_rate_ratio=2.0)
    assert not is_measured(reports, replace(settings, tokens=5))
    for other in (replace(emulated, inter_mbit=1000), None):
        emulate(other)
        assert not is_measured(reports, settings)


@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_killed_sweep_goes_on(tmp_path: Path) -> None:
    """Three points, two layouts: killed behind the first, then finished."""
    flags = "repeats: 2, phase: forward_backward, stock: alltoall"
    chains = "chains: [alltoall, hierarchical_allgather, auto]"
    headline = HEADLINE.replace("num-chunks", f"{flags}, {chains}, num-chunks")
    out = tmp_path / "out.jsonl"
    cluster = str(CONFIGS / "clusters" / "emulated_2x4_500mbit.yaml")
    # 4 ranks that stand for 2 nodes.
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *(SCRIPT, "--ranks-per-node", "2"),
        *("--sweep", sweep_file(tmp_path, "[{}, {tp: 2}, {tokens: 8}]", headline)),
        *("--out", str(out), "--cluster", cluster, "--inter-rate-ratio", "0.5"),
    ]
    # Step 1: kill it behind the first point.
    with started(command[1:], tmp_path, MONTA_CPU_RANKS="1") as (process, _):
        wait_for(process, lambda: out.exists() and "\n" in out.read_text(), tmp_path / "stderr")
        process.terminate()
    kept = out.read_text().splitlines(keepends=True)
    with out.open("a") as file:
        file.write('{"settings": {"cut')

    # Step 2: the same command again.
    environ = {**os.environ, "MONTA_CPU_RANKS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} of 3 points kept from before" in done.stderr
    lines = out.read_text().splitlines(keepends=True)
    assert lines[: len(kept)] == kept
    reports = [json.loads(line) for line in lines]
    settings = [report["meta"]["settings"] for report in reports]
    assert [(point["etp"], point["tokens"]) for point in settings] == [(1, 4), (2, 4), (1, 8)]
    summary = summarise(measured_points(reports))
    assert (summary["regret_points"], summary["auto_points"]) == (3, 3)
    assert summary["regret_median"] >= 1
    # One chunk of alltoall, 1 and 3 of the other, and perhaps what auto chose.
    assert 3 * 3 <= summary["predictions"] <= 3 * 4

    # Step 3: tables and the picture from the file, without a launch.
    result = subprocess.run(
        [sys.executable, SCRIPT, "--report", str(out), "--plot", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == done.stdout and "rate over calibrated 0.5" in result.stdout
    assert (tmp_path / "predicted.png").read_bytes().startswith(b"\x89PNG")
