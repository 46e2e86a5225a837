"""Occult's table on drawn traces: placed, then pruned, as `monta plan` counts them."""

import json
import sys
from pathlib import Path

import clustered_traces
import pytest

from monta_megatron.cli import main

NODES = "--num-nodes 4 --ranks-per-node 1 --nics-per-node 1 --gpu A100"
PAGE = Path(__file__).parents[3] / "docs" / "placement.md"
# Traces, in the order of the page's table. Occult: 3.68 copies of a token, 3.02 where experts are
# placed, 1.98 and 1.0 where it is pruned.
TRACES = ("uniform", "as_trained", "placed", "two_ranks", "one_rank")


def rows_of_page() -> list[list[str]]:
    """Its table of copies, bytes and times, without the heading."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    _, *rows = [line.strip("| ").split(" | ") for line in lines if line.count("|") == 10]
    return rows


def test_copies_of_occults_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one exchange, 2,048 tokens: those of the table in docs/placement.md."""
    monkeypatch.chdir(Path(__file__).parents[3])
    model, cluster, placement = (
        tmp_path / name for name in ("model.yaml", "nodes.yaml", "placement.json")
    )
    monkeypatch.setattr(sys, "argv", ["clustered_traces.py", str(tmp_path)])
    clustered_traces.main()
    assert main(f"new cluster {NODES} --network-rate-reached 200Mb/s --out {cluster}".split()) == 0
    flags = f"--model {model} --cluster {cluster}"
    words = f"place --trace {tmp_path}/trace {flags} --out {placement} --json".split()
    capsys.readouterr()
    assert main(words) == 0
    after = json.loads(capsys.readouterr().out)["copies_per_token"]["after"]["held_out"]
    assert after == {"rank": pytest.approx(3.02, abs=0.01), "node": after["rank"]}
    sys.argv += ["--placement", str(placement)]
    clustered_traces.main()
    for way, row in zip(TRACES, rows_of_page(), strict=True):
        words = f"plan {flags} --ep 4 --tokens 512 --routing {tmp_path}/{way} --json".split()
        assert main([*words, "--ignore-memory"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert f"{plan['collaboration']['0']['node']['copies']:.2f}" == row[2]
        (dedup,) = (
            entry
            for entry in plan["candidates"]
            if (entry["chain"], entry["num_chunks"]) == ("alltoall_dedup", 1)
        )
        assert f"{dedup['inter_bytes']:,.0f}" == row[4]
