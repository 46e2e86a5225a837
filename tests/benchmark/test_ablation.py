"""The paper's ablation, `benchmarks/ablation.py`."""

from pathlib import Path

import golden
import pytest
from ablation import STUDY, ablation_text, check, steps_of
from forked_ranks import ForkedRanks
from sweep import is_measured, read_reports
from test_bench_command import SMALL
from test_bench_numbers import BASE, row

from monta_megatron.common import strict_yaml
from monta_megatron.tools.bench.settings import Settings, parse_settings

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ablation.py"


def test_the_ablation(ranks: ForkedRanks, tmp_path: Path) -> None:
    out, sweep = tmp_path / "out.jsonl", tmp_path / "sweep.yaml"
    sweep.write_text("headline: {tp: 2, num-chunks: 2, phase: forward}\npoints: [{}]\n")
    files = ("--sweep", str(sweep), "--out", str(out))
    result = ranks.run(str(SCRIPT), *SMALL.split(), *files)
    assert result.returncode == 0, result.stderr
    (report,) = reports = read_reports(out)
    # Stock, step 0, ours in 1, 2 and 4 chunks, and step 2, which has no other key than step 3.
    assert [row["num_chunks"] for row in report["rows"]] == [1, 1, 1, 2, 4, 4]
    # A group of two ranks sends everything twice.
    _, whole_group, serial, *_ = report["rows"]
    assert whole_group["inter_bytes"] == 2 * serial["inter_bytes"]
    assert "ablation.py --experts 8" in report["meta"]["command"]
    assert result.stdout == ablation_text(reports) + "\n"
    # Kept for the script, but not for `monta bench` with the same flags.
    settings = strict_yaml.build(Settings, report["meta"]["settings"], "settings")
    assert is_measured(reports, settings, study=STUDY) and not is_measured(reports, settings)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--tp: got 1, must be above 1"),
        ({"tp": "2", "etp": "1"}, "--etp: got 1, must be equal to --tp (2)"),
        ({"tp": "2", "chains": "alltoall"}, "--chains: got alltoall, must be left out"),
    ],
)
def test_flags_that_the_steps_do_not_allow(flags: dict[str, str], message: str) -> None:
    line = golden.refusal(check, parse_settings({**BASE, **flags}, world_size=4))
    assert message in line and "\n" not in line


def test_steps_by_hand() -> None:
    chain = "alltoall_allgather"
    stock = {"dispatcher": "megatron", "chain": "alltoall", "num_chunks": 1}
    rows = [
        row(**stock, median_ms=70.0),
        row(**stock, median_ms=80.0),
        row(chain=chain, num_chunks=1, median_ms=40.0),
        row(chain=chain, num_chunks=2, median_ms=16.0),
        row(chain=chain, num_chunks=4, median_ms=20.0),
        row(chain=chain, num_chunks=4, median_ms=10.0),
    ]
    steps = steps_of(rows)
    # Step 2 exists in the ablation alone, so step 4 does not take it although it is the fastest.
    assert [step.median_ms for step in steps] == [80, 40, 10, 20, 16]
    assert [step.num_chunks for step in steps] == [1, 1, 4, 4, 2]
    settings = {"experts": 8, "hidden": 16, "phase": ["forward_backward"]}
    meta = {"settings": settings, "nodes": [0, 1]}
    text = ablation_text([{"meta": meta, "rows": [vars(row) for row in rows]}])
    # ms, gain over the step before, gain over step 0.
    assert [line.split()[-3:] for line in text.splitlines()[2:]] == [
        ["80.0", "1.00", "1.00"],
        ["40.0", "2.00", "2.00"],
        ["10.0", "4.00", "8.00"],
        ["20.0", "0.50", "4.00"],
        ["16.0", "1.25", "5.00"],
    ]
