"""The planner's table of host operations is what the executor hands to a device.

A figure that is off is printed with what was counted: write that into
`planner.traffic.HOST_OPERATIONS`, or that of `planner.traffic`.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from statistics import mean
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")

import launch_counts
from launch_counts import LaunchCounter, count_launches
from stream_recorder import Recorder

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import Kind, Operation, Pass, Policy, RowFormat
from monta_megatron.exchange import operations
from monta_megatron.exchange.buffers import Buffers
from monta_megatron.exchange.kernels import operations as fused_operations
from monta_megatron.planner.traffic import num_host_operations

EP, NUM_CHUNKS = 16, 4
# Two blocks of columns in a sum, as bf16 rows of that size have.
HIDDEN = 4096
# The table holds one integer for a kind in all chains: a quarter off, or one and a half operations.
RELATIVE, ABSOLUTE = 0.25, 1.5
# For a whole layer: what the first chunk of a pass makes for all, and what lies around the passes.
RELATIVE_OF_LAYER, ABSOLUTE_OF_LAYER = 0.15, 14

Issued = tuple[Kind, Pass, RowFormat, int]
pytestmark = pytest.mark.usefixtures("world")


# By what does the work: the executor's table, and the policy of its programs.
TABLES: dict[str, tuple[Any, str, Policy]] = {
    "torch": (operations, "OPERATIONS", "streams"),
    "fused": (fused_operations, "FUSED_OPERATIONS", "fused"),
}
each_kernels = pytest.mark.parametrize("kernels", TABLES)


@cache
def issued_by(chain: str, kernels: str) -> tuple[tuple[Issued, ...], int]:
    """What every operation of a layer's programs took, and what the whole layer did."""
    counters: list[LaunchCounter] = []
    issued: list[Issued] = []

    def counter_of(recorder: Recorder) -> LaunchCounter:
        counters.append(LaunchCounter(recorder))
        return counters[-1]

    def counted(do: Callable[..., Any]) -> Callable[..., Any]:
        def do_counted(buffers: Buffers, operation: Operation) -> Any:
            program, before = buffers.bound.program, counters[0].read()[0]
            works = do(buffers, operation)
            number = int(counters[0].read()[0] - before)
            issued.append((operation.kind, program.pass_, program.row, number))
            return works

        return do_counted

    module, table, _ = TABLES[kernels]
    operations = {kind: counted(do) for kind, do in getattr(module, table).items()}
    with (
        mock.patch.object(launch_counts, "LaunchCounter", counter_of),
        mock.patch.object(launch_counts, "HIDDEN", HIDDEN),
        mock.patch.object(module, table, operations),
    ):
        rows = count_launches(chain, EP, 1 if CHAINS[chain].serial else NUM_CHUNKS, kernels)
    return tuple(issued), sum(row.tensor_operations for row in rows.values())


@each_kernels
def test_every_kind_takes_what_the_table_says(kernels: str) -> None:
    counted: dict[tuple[Kind, Pass, RowFormat], list[int]] = defaultdict(list)
    for chain, each in CHAINS.items():
        # One chunk has what later ones share.
        if not each.serial:
            for kind, pass_, row, number in issued_by(chain, kernels)[0]:
                counted[kind, pass_, row].append(number)
    off = {
        f"{kind} in {pass_.name}": f"{table} in the table, {mean(numbers):.1f} counted"
        for (kind, pass_, row), numbers in counted.items()
        for table in [num_host_operations(kind, pass_, row, TABLES[kernels][2], NUM_CHUNKS)]
        if abs(table - mean(numbers)) > max(RELATIVE * mean(numbers), ABSOLUTE)
    }
    assert off == {}


@each_kernels
@pytest.mark.parametrize("chain", CHAINS)
def test_a_layer_takes_what_the_table_says(chain: str, kernels: str) -> None:
    policy = TABLES[kernels][2]
    issued, total = issued_by(chain, kernels)
    num_chunks = 1 if CHAINS[chain].serial else NUM_CHUNKS
    planned = sum(
        num_host_operations(kind, pass_, row, policy, num_chunks) for kind, pass_, row, _ in issued
    )
    dispatch, row = next((pass_, row) for _, pass_, row, _ in issued if pass_.ids)
    around = ["count", "alltoall", *(["lists"] if CHAINS[chain].rows == "tokens" else [])]
    planned += sum(num_host_operations(kind, dispatch, row, policy) for kind in around)
    assert abs(planned - total) <= max(RELATIVE_OF_LAYER * total, ABSOLUTE_OF_LAYER)
