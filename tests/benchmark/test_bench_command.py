"""`monta bench` as a command: its JSON, and what stops it."""

import json
import os
import re
from pathlib import Path
from typing import Any

import golden
import pytest
from forked_ranks import ForkedRanks

from monta_megatron.chains import CHAINS

HERE = Path(__file__).parent
CLUSTER = HERE.parents[1] / "configs/clusters/a800_2x8_ib200.yaml"
SMALL = "--experts 8 --top-k 3 --hidden 32 --tokens 40 --repeats 2 --ranks-per-node 2"
MONTA_BENCH = ("-m", "monta_megatron", "bench")


def bench(ranks: ForkedRanks, arguments: str, *script: str) -> tuple[dict[str, Any], str]:
    """The report, which is all of standard output, and standard error."""
    result = ranks.run(*(script or MONTA_BENCH), *arguments.split(), "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


def test_report_holds_every_chain_and_field(ranks: ForkedRanks) -> None:
    report, _ = bench(ranks, f"{SMALL} --num-chunks 1,3 --layer --phase forward,forward_backward")
    meta, rows = report["meta"], report["rows"]
    assert set(report) == {"meta", "rows"}
    assert set(meta["versions"]) >= {"monta-megatron", "megatron-core", "torch", "python"}
    assert meta["machine"]["cores"] == os.cpu_count()
    assert meta["command"].startswith("monta bench --experts 8")
    assert (meta["nodes"], meta["skipped"]) == ([0, 0, 1, 1], {})
    assert {"nccl", "triton", "transformer-engine", "driver"} <= set(meta["versions"])
    assert isinstance(meta["busy"], list)
    assert (meta["settings"]["ep"], meta["settings"]["repeats"]) == (4, 2)

    # Scripts rely on these names.
    kinds = {name: {type(row[name]).__name__ for row in rows} for name in rows[0]}
    fields = {name: ", ".join(sorted(found)) for name, found in kinds.items()}
    golden.check_lines(HERE / "fields.txt", fields)
    for row in rows:
        assert row.keys() == fields.keys()
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        # Two repeats have no percentiles.
        assert row["p10_ms"] is row["p90_ms"] is None
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
    chains = "--chains alltoall,hierarchical_allgather,auto --num-chunks 1 --tune-steps 8"
    arguments = f"{SMALL} {chains} --phase forward_backward --cluster {CLUSTER}"
    report, said = bench(ranks, arguments)
    (tuned,) = [line for line in said.splitlines() if " wins with " in line]
    (auto,) = [row for row in report["rows"] if row["chosen"]]
    # The log's winner is the row that was timed.
    assert f": {auto['chain']} in {auto['num_chunks']} chunk wins with " in tuned
    assert auto["predicted_ms"] > 0


def test_wrong_results_stop_it_before_anything_is_timed(ranks: ForkedRanks) -> None:
    flags = "--chains alltoall_allgather --num-chunks 2"
    result = ranks.run(str(HERE / "bench_with_fault.py"), *SMALL.split(), *flags.split())
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
    flags = f"{SMALL} {layout} --num-chunks 1,3 --repeats 1"
    report, said = bench(ranks, flags, str(HERE / "bench_through_host.py"))
    assert set(CHAINS) - set(report["meta"]["skipped"]) <= {row["chain"] for row in report["rows"]}
    (num_copied,) = re.findall(r"copied: (\d+)", said)
    assert int(num_copied) > 100


def test_refused_chain_asked_for_by_name_is_one_line(ranks: ForkedRanks) -> None:
    result = ranks.run(*MONTA_BENCH, *f"{SMALL} --tp 2 --chains alltoall_dedup".split())
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("monta bench: ")]
    assert "alltoall_dedup cannot run here: expert_tensor_parallel_size is 2" in line


def test_nodes_are_the_launchs_whatever_the_cluster_file_has(
    ranks: ForkedRanks, tmp_path: Path
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER.read_text().replace("per_node: 8", "per_node: 1"))
    flags = SMALL.replace("--ranks-per-node 2", f"--cluster {cluster} --chains alltoall")
    report, _ = bench(ranks, f"{flags} --stock alltoall")
    assert [row["inter_bytes"] for row in report["rows"]] == [0, 0]
