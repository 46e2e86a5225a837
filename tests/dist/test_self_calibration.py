"""A training without a cluster file calibrates its exchange, once, and all ranks alike."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Pools
from layers import Case, disagree
from pool import PoolError
from self_calibrations import calibrated, calibrated_with_triton_on_some

from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import dump_measured, load_cluster

# 2 nodes of 2 ranks.
AUTO = {"moe_monta_chain": "auto", "moe_monta_ranks_per_node": 2}
CASE = Case(options={**AUTO, "moe_monta_calibrate_seconds": 1.5})


def test_it_is_measured_once_and_then_read(pools: Pools, tmp_path: Path) -> None:
    """The ranks' caches differ: that of the first one is everybody's."""
    caches = [str(tmp_path / str(rank)) for rank in range(4)]
    measured = pools[4].run(calibrated, CASE, caches)
    costs = {entry[0] for entry in measured}
    assert len(costs) == 1
    (path,) = tmp_path.rglob("*.yaml")
    assert path.is_relative_to(caches[0]) and path.name == "cluster_ep4_etp1_rank_0.yaml"
    said = [lines for _, lines, _ in measured]
    assert said[1:] == [[], [], []]
    # Once, though two layers were built; what they choose is said with their first exchange.
    (line,) = said[0]
    assert re.fullmatch(
        r"monta: calibrated for want of a cluster file, in [\d.]+ s: 14 curves in \d+ rounds?, "
        r"network to .+B, node link to .+B, memory to .+B per rank; \d+ larger "
        rf"sizes? left out, extrapolated; held up to .+, given back; kept in {path}",
        line,
    )
    assert max(elapsed_s for _, _, elapsed_s in measured) < 1.5 + 3

    # A second start, and one of ranks whose own caches hold something else.
    cluster = load_cluster(path)
    other = Path(caches[1], path.relative_to(caches[0]))
    other.parent.mkdir(parents=True)
    other.write_text(dump_measured(replace(cluster, num_nodes=5)))
    again = pools[4].run(calibrated, CASE, caches)
    assert {entry[0] for entry in again} == costs
    (line,) = again[0][1]
    day = cluster.source.rpartition("; measured ")[2]
    assert line == f"monta: calibrated before: {path}, {day}"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda cluster: replace(cluster, source=cluster.source.replace("Gloo", "NCCL 2.99")),
            r"measured on CPU ranks, 2 x 2 ranks, EP 4 x ETP 1, torch [^,]+, NCCL 2.99, .+, and "
            r"here is CPU ranks, 2 x 2 ranks, EP 4 x ETP 1, torch [^,]+, Gloo, .+",
        ),
        (
            lambda cluster: replace(cluster, source=f"{cluster.source[:-10]}2020-02-02"),
            r"measured \d+ days ago, at most 30 are trusted",
        ),
    ],
)
def test_a_cache_that_is_not_taken(
    pools: Pools, tmp_path: Path, change: Callable[[Cluster], Cluster], why: str
) -> None:
    caches = [str(tmp_path)] * 4
    pools[4].run(calibrated, CASE, caches)
    (path,) = tmp_path.rglob("*.yaml")
    path.write_text(dump_measured(change(load_cluster(path))))
    first, *_ = pools[4].run(calibrated, CASE, caches)
    not_taken, measured = first[1]
    assert re.fullmatch(rf"monta: {path}: not taken: {why}; calibrates again", not_taken)
    assert measured.startswith("monta: calibrated for want of a cluster file")


def test_ranks_that_would_not_all_calibrate_are_told(pools: Pools) -> None:
    seconds = {rank: {"moe_monta_calibrate_seconds": float(rank != 2)} for rank in range(4)}
    with pytest.raises(PoolError, match=r"2 differ in moe_monta_calibrate_seconds: 1.0 and 0.0"):
        pools[4].run(disagree, Case(options=AUTO), seconds)


def test_ranks_with_other_kernels_measure_the_same(pools: Pools, tmp_path: Path) -> None:
    caches = [str(tmp_path / str(rank)) for rank in range(4)]
    assert len(set(pools[4].run(calibrated_with_triton_on_some, CASE, caches))) == 1
