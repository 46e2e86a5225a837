"""`monta bench` as a command: its JSON, and what stops it."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import ForkedRanks

from monta_megatron.chains import CHAINS

CLUSTER = Path(__file__).parents[2] / "configs/clusters/a800_2x8_ib200.yaml"
SMALL = "--experts 8 --top-k 3 --hidden 32 --tokens 40 --repeats 2 --ranks-per-node 2"
# Scripts rely on these names.
ROW_FIELDS = {
    **dict.fromkeys(("dispatcher", "chain", "scope", "phase", "routing"), str),
    **dict.fromkeys(("num_chunks", "tokens", "top_k", "inter_bytes", "intra_bytes"), int),
    **dict.fromkeys(("tp", "ep", "etp"), int),
    **dict.fromkeys(("inter_mbit", "pct_of_limit", "predicted_ms"), type(None)),
    **dict.fromkeys(("median_ms", "p10_ms", "p90_ms", "ratio_to_alltoall"), float),
    "chosen": bool,
    "experts_pipelined": (bool, type(None)),
}


MONTA_BENCH = ("-m", "monta_megatron", "bench")


def bench(
    ranks: ForkedRanks, arguments: str, command: Sequence[str] = MONTA_BENCH
) -> dict[str, Any]:
    result = ranks.run(*command, *arguments.split(), "--json")
    assert result.returncode == 0, result.stderr
    # Nothing else on standard output.
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_experts_in_the_pipeline_are_rows_of_the_layer(ranks: ForkedRanks) -> None:
    flags = "--num-chunks 1,2 --chains alltoall,hierarchical_alltoall --phase forward_backward"
    report = bench(ranks, f"{SMALL} {flags} --layer --overlap-experts --expert-ms 20")
    rows = {
        (row["scope"], row["chain"], row["num_chunks"], row["experts_pipelined"]): row
        for row in report["rows"]
    }
    assert [key for key in rows if key[3]] == [("layer", "hierarchical_alltoall", 2, True)]
    split, whole = (rows["layer", "hierarchical_alltoall", 2, flag] for flag in (True, False))
    # The same bytes, and the timer's 20 ms in each direction.
    for name in ("inter_bytes", "intra_bytes"):
        assert split[name] == whole[name] > 0
    assert min(split["median_ms"], whole["median_ms"]) > 0.8 * 40


def test_auto_may_split_the_experts(ranks: ForkedRanks) -> None:
    flags = "--num-chunks 2 --chains auto --stock alltoall --phase forward_backward"
    report = bench(ranks, f"{SMALL} {flags} --layer --overlap-experts --expert-ms 20")
    exchange, alone, overlapped = (row for row in report["rows"] if row["chosen"])
    assert [row["scope"] for row in (exchange, alone, overlapped)] == ["exchange", *["layer"] * 2]
    assert alone["experts_pipelined"] is False
    assert isinstance(overlapped["experts_pipelined"], bool)


def test_report_holds_every_chain_and_field(ranks: ForkedRanks) -> None:
    report = bench(ranks, f"{SMALL} --num-chunks 1,3 --layer --phase forward,forward_backward")
    meta, rows = report["meta"], report["rows"]
    assert set(report) == {"meta", "rows"}
    assert set(meta["versions"]) >= {"monta-megatron", "megatron-core", "torch", "python"}
    assert meta["machine"]["cores"] == os.cpu_count()
    assert meta["command"].startswith("monta bench --experts 8")
    assert (meta["nodes"], meta["skipped"]) == ([0, 0, 1, 1], {})
    assert (meta["settings"]["ep"], meta["settings"]["repeats"]) == (4, 2)

    for row in rows:
        assert set(row) == set(ROW_FIELDS)
        for field, kind in ROW_FIELDS.items():
            assert isinstance(row[field], kind), (field, row[field])
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
    keys = {
        (row["dispatcher"], row["chain"], row["num_chunks"], row["scope"], row["phase"])
        for row in rows
        if not row["chosen"]
    }
    # Two of stock's, alltoall in one chunk, five chains in 1 and 3; two scopes, two phases.
    assert len(keys) == (2 + 1 + 5 * 2) * 2 * 2
    autos = [row for row in rows if row["chosen"]]
    assert len(autos) == 2 * 2 == len(rows) - len(keys)
    assert all(row["chain"] in CHAINS for row in autos)

    by_key = {
        (row["dispatcher"], row["chain"], row["num_chunks"], row["phase"]): row for row in rows
    }
    for phase in ("forward", "forward_backward"):
        stock = by_key["megatron", "alltoall", 1, phase]
        assert stock["ratio_to_alltoall"] == 1.0
        # Counted from the routing, and by the executor as it sent the same rows.
        ours = by_key["monta", "alltoall", 1, phase]
        for name in ("inter_bytes", "intra_bytes"):
            assert stock[name] == ours[name]
        hierarchical = by_key["monta", "hierarchical_alltoall", 3, phase]
        assert hierarchical["inter_bytes"] < stock["inter_bytes"]


def test_auto_is_timed_after_its_tuning(ranks: ForkedRanks) -> None:
    arguments = (
        f"{SMALL} --chains alltoall,hierarchical_allgather,auto --num-chunks 1 --tune-steps 8 "
        f"--phase forward_backward --cluster {CLUSTER} --json"
    )
    result = ranks.run(*MONTA_BENCH, *arguments.split())
    assert result.returncode == 0, result.stderr
    (tuned,) = [line for line in result.stderr.splitlines() if " wins with " in line]
    rows = [row for row in json.loads(result.stdout)["rows"] if row["dispatcher"] == "monta"]
    (auto,) = [row for row in rows if row["chosen"]]
    # The log's winner is the row that was timed.
    assert f": {auto['chain']} in {auto['num_chunks']} chunk wins with " in tuned
    assert auto["predicted_ms"] > 0


def test_wrong_results_stop_it_before_anything_is_timed(ranks: ForkedRanks) -> None:
    script = str(Path(__file__).with_name("bench_with_fault.py"))
    flags = "--chains alltoall_allgather --num-chunks 2"
    result = ranks.run(script, *SMALL.split(), *flags.split())
    assert result.returncode == 1
    assert "results differ, nothing was timed" in result.stderr
    differ = r"^monta alltoall_allgather in 2 chunks: (.+) differ from stock's \(rank (.+)\)$"
    ranks_of = dict(re.findall(differ, result.stderr, re.MULTILINE))
    assert ranks_of["rows at the experts"] == "1"
    assert "outputs" in ranks_of
    assert "repeats" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("layout", ["", "--tp 2 --ep 2 --etp 2"])
def test_messages_through_the_host_give_the_same_bits(ranks: ForkedRanks, layout: str) -> None:
    """All chains and stock's, whose tensors are copied to the host and back."""
    script = str(Path(__file__).with_name("bench_through_host.py"))
    result = ranks.run(script, *f"{SMALL} {layout} --num-chunks 1,3 --repeats 1".split(), "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert set(CHAINS) - set(report["meta"]["skipped"]) <= {row["chain"] for row in report["rows"]}
    (num_copied,) = re.findall(r"copied: (\d+)", result.stderr)
    assert int(num_copied) > 100


def test_refused_chain_asked_for_by_name_is_one_line(ranks: ForkedRanks) -> None:
    arguments = f"{SMALL} --tp 2 --chains alltoall_dedup"
    result = ranks.run(*MONTA_BENCH, *arguments.split())
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("monta bench: ")]
    assert len(lines) == 1, result.stderr
    assert "alltoall_dedup cannot run here: expert_tensor_parallel_size is 2" in lines[0]


def test_nodes_are_the_launchs_whatever_the_cluster_file_has(
    ranks: ForkedRanks, tmp_path: Path
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER.read_text().replace("per_node: 8", "per_node: 1"))
    flags = SMALL.replace("--ranks-per-node 2", f"--cluster {cluster} --chains alltoall")
    report = bench(ranks, f"{flags} --stock alltoall")
    assert [row["inter_bytes"] for row in report["rows"]] == [0, 0]
