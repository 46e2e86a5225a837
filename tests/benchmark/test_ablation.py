"""The paper's ablation, `benchmarks/ablation.py`."""

from pathlib import Path

import golden
import pytest
from ablation import STUDY, ablation_steps, ablation_text, check
from forked_ranks import ForkedRanks
from sweep import Results
from test_bench_command import SMALL, bench
from test_bench_numbers import BASE, row

from monta_megatron.common import strict_yaml
from monta_megatron.tools.bench.settings import Settings, parse_settings

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def test_the_ablation(ranks: ForkedRanks, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    flags = f"--tp 2 --num-chunks 2 --phase forward --out {out}"
    report = bench(ranks, f"{SMALL} {flags}", [str(SCRIPTS / "ablation.py")])
    steps = report["ablation"]
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    assert [step["num_chunks"] for step in steps[:3]] == [1, 1, 4]
    assert steps[0]["gain_over_step_0"] == 1.0
    product = 1.0
    for step in steps:
        product *= step["gain"]
        assert step["gain_over_step_0"] == pytest.approx(product)
    # A group of two ranks sends everything twice.
    _, whole_group, serial, *_ = report["rows"]
    assert whole_group["inter_bytes"] == 2 * serial["inter_bytes"]
    assert "ablation.py --experts 8" in report["meta"]["command"]
    assert ablation_text([report])
    # Kept for the script, but not for `monta bench` with the same flags.
    settings = strict_yaml.build(Settings, report["meta"]["settings"], "settings")
    results = Results.open(out)
    assert results.holds(settings, None, study=STUDY) and not results.holds(settings, None)


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


def test_ablation_steps_by_hand() -> None:
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
    steps = ablation_steps(rows)
    # Step 2 exists in the ablation alone, so step 4 does not take it although it is the fastest.
    assert [step.median_ms for step in steps] == [80, 40, 10, 20, 16]
    assert [step.num_chunks for step in steps] == [1, 1, 4, 4, 2]
    assert [step.gain for step in steps] == [1, 2, 4, 0.5, 1.25]
    assert [step.gain_over_step_0 for step in steps] == [1, 2, 8, 4, 5]
