"""The operations of every pass, as a table and as JSON: what `monta plan --program` shows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from monta_megatron.chains import CHAINS
from monta_megatron.chains.pipelined_layer import BoundLayer
from monta_megatron.chains.program import PASSES, BoundProgram, Operation
from monta_megatron.common.tables import table
from monta_megatron.common.units import size_text
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layer_price import bound_layers
from monta_megatron.planner.plan import Plan
from monta_megatron.planner.workload import Workload

# One operation on the first rank, as plain values; docs/plans.md has the fields.
Row: TypeAlias = dict[str, Any]


def program_of(plan: Plan, workload: Workload, cluster: Cluster) -> dict[str, list[Row]]:
    """Pass -> its operations, for the chain that a plan chose."""
    chain, phase = CHAINS[plan.chain], plan.key.phase
    programs: Sequence[BoundProgram]
    if plan.experts_pipelined:
        place = replace(workload.layout, rank=0)
        programs = bound_layers(workload, chain, plan.num_chunks, place, cluster.policy, phase)
    else:
        bound = workload.bind(chain, plan.num_chunks)
        programs = [workload.lower(bound, pass_, cluster.policy) for pass_ in PASSES[phase]]
    return {
        program.program.pass_.name: [
            _row(program, operation) for operation in program.program.operations
        ]
        for program in programs
    }


def program_lines(programs: dict[str, list[Row]]) -> Iterator[str]:
    """A table for each pass."""
    for pass_, rows in programs.items():
        cells = [
            (
                row["number"],
                row["operation"],
                row["stage"],
                row["chunk"],
                f"{','.join(map(str, row['reads']))}>{row['writes'][0]}",
                f"{row['rows']:.0f}",
                size_text(row["bytes"]),
                " ".join(filter(None, (row["resource"], row["group"]))),
            )
            for row in rows
        ]
        name = pass_.replace("_", " ")
        columns = (">", name, "stage", ">in", ">moves", ">rows", ">bytes", "occupies")
        yield table(columns, cells) + "\n"
    yield "in: number of the chunk. moves: buffer read > written; 0: the pass's input."
    yield "rows and bytes: written by the first rank."


def _row(bound: BoundProgram, operation: Operation) -> Row:
    written = bound.program.buffers[operation.writes[0]]
    # Of the whole output, an operation writes its chunk's rows; what finds copies writes none.
    rows = (
        bound.rows(written)
        if isinstance(bound, BoundLayer)
        else written.copies * bound.bound.rows_at[written.boundary][operation.chunk]
    )
    row_bytes = sum(bound.message_bytes(written))
    return {
        "number": operation.number,
        "operation": operation.kind,
        "stage": operation.stage,
        "chunk": operation.chunk,
        "reads": list(operation.reads),
        "writes": list(operation.writes),
        "rows": rows if row_bytes else 0.0,
        "bytes": row_bytes * rows,
        "resource": operation.resource,
        "group": operation.group if operation.is_collective else None,
    }
