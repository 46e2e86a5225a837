"""The paper's ablation, `benchmarks/ablation.py`."""

import ast
from pathlib import Path

import golden
from ablation import STUDY, ablation_text, check
from forked_ranks import ForkedRanks
from sweep import is_measured, read_reports
from test_bench_command import SMALL
from test_bench_numbers import BASE, HERE, REPORTS

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


def test_flags_that_the_steps_do_not_allow() -> None:
    def answer(flags: str) -> str:
        return golden.refusal(check, parse_settings({**BASE, **ast.literal_eval(flags)}, 4))

    golden.check_cases(HERE / "bad_ablations.txt", answer)


def test_steps_by_hand() -> None:
    golden.check(HERE / "ablation.txt", ablation_text(REPORTS["ablation"]) + "\n")
