"""Sweeps: their files, how they go on after a kill, and what their summary says."""

import json
from dataclasses import replace
from pathlib import Path

import golden
import pytest
from forked_ranks import ForkedRanks
from interrupts import started, wait_for
from run_python import run_python
from summary import measured_points, summarise, summary_text
from sweep import check_can_plot, is_measured, read_reports, read_sweep
from test_bench_numbers import BASE, HERE, REPORTS

from monta_megatron.common import strict_yaml
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.tools import pictures
from monta_megatron.tools.bench.settings import parse_settings

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
    settings = [point.settings for point in points]
    assert [(one.tokens, one.hidden, one.tp, one.ep, one.etp) for one in settings] == [
        (6, 16, 1, 4, 1),
        (8, 32, 1, 4, 1),
        (6, 16, 2, 2, 2),
    ]
    assert {(one.repeats, one.num_chunks) for one in settings} == {(15, (1, 3))}


def test_without_matplotlib_the_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    check_can_plot(None)
    line = golden.refusal(check_can_plot, str(tmp_path / "plots"))
    assert line == "--plot: needs matplotlib: pip install matplotlib"
    assert not (tmp_path / "plots").exists()


def test_bad_sweep_files_are_one_line(tmp_path: Path) -> None:
    """A case is what stands behind `points:`, in a file of one line."""
    path = tmp_path / "sweep.yaml"

    def answer(points: str) -> str:
        path.write_text(f"{{{HEADLINE.strip()}, points: {points}}}\n")
        return golden.refusal(read_sweep, str(path), {}, 4).replace(str(path), "sweep.yaml")

    golden.check_cases(HERE / "bad_sweeps.txt", answer)


def test_summary_of_hand_made_points() -> None:
    golden.check(HERE / "summary.txt", summary_text(REPORTS["summary"]) + "\n")
    assert "Regret" not in summary_text(REPORTS["no_alternative"])


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
    meta = {"settings": strict_yaml.plain(settings), "emulated_cluster": vars(emulated)}
    reports = [{"meta": {**meta, "inter_rate_ratio": 1.0}, "rows": []}]
    for cluster, wanted, ratio in (
        (emulated, settings, 1.0),
        (emulated, settings, 2.0),
        (emulated, replace(settings, tokens=5), 1.0),
        (replace(emulated, inter_mbit=1000), settings, 1.0),
        (None, settings, 1.0),
    ):
        monkeypatch.setattr(EmulatedCluster, "from_environment", lambda cluster=cluster: cluster)
        is_same = (cluster, wanted, ratio) == (emulated, settings, 1.0)
        assert is_measured(reports, wanted, inter_rate_ratio=ratio) == is_same


@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_killed_sweep_goes_on(ranks: ForkedRanks, tmp_path: Path) -> None:
    """Three points, two layouts: killed behind the first, then finished."""
    flags = "repeats: 2, phase: forward_backward, stock: alltoall"
    chains = "chains: [alltoall, hierarchical_allgather, auto]"
    headline = HEADLINE.replace("num-chunks", f"{flags}, {chains}, num-chunks")
    out = tmp_path / "out.jsonl"
    cluster = "emulated_2x4_500mbit"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    # 4 ranks that stand for 2 nodes.
    words = [
        *(SCRIPT, "--ranks-per-node", "2"),
        *("--sweep", sweep_file(tmp_path, "[{}, {tp: 2}, {tokens: 8}]", headline)),
        *("--out", str(out), "--cluster", cluster, "--inter-rate-ratio", "0.5"),
    ]
    # Step 1: kill it behind the first point.
    with started([*torchrun, *words], tmp_path, MONTA_CPU_RANKS="1") as (process, _):
        wait_for(process, lambda: out.exists() and "\n" in out.read_text(), tmp_path / "stderr")
        process.terminate()
    kept = out.read_text().splitlines(keepends=True)
    with out.open("a") as file:
        file.write('{"settings": {"cut')

    # Step 2: the same command again, on forked ranks.
    done = ranks.run(*words)
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
    result = run_python(SCRIPT, "--report", out, "--plot", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == done.stdout and "rate over calibrated 0.5" in result.stdout
    assert (tmp_path / "predicted.png").read_bytes().startswith(b"\x89PNG")
