"""The operations of every pass, as a table and as JSON: what `monta plan --program` shows."""

from collections.abc import Iterator
from dataclasses import dataclass

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import BoundProgram, Operation
from monta_megatron.planner.chain_price import WALKS
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import Plan
from monta_megatron.planner.workload import Workload
from monta_megatron.quantities import size_text


@dataclass(frozen=True, kw_only=True)
class OperationRow:
    """One operation of a pass on the first rank.

    Attributes:
        number: its place in the order of issue.
        operation: what is done.
        stage: the chain's stage, as errors and timelines name it.
        chunk: whose rows.
        reads: numbers of the buffers that it reads; 0 is the input.
        writes: numbers of the buffers that it writes.
        rows: rows that it writes; what finds copies writes none.
        bytes: bytes of them.
        resource: what it occupies.
        group: the group of a collective, or None.
    """

    number: int
    operation: str
    stage: str
    chunk: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    rows: float
    bytes: float
    resource: str
    group: str | None


def program_of(plan: Plan, workload: Workload, cluster: Cluster) -> dict[str, list[OperationRow]]:
    """Pass -> its operations, for the chain that a plan chose."""
    bound = workload.bind(CHAINS[plan.chain], plan.num_chunks)
    programs = [workload.lower(bound, walk, cluster.policy) for walk in WALKS[plan.situation.phase]]
    return {
        program.program.walked.name: [
            _row(program, operation) for operation in program.program.operations
        ]
        for program in programs
    }


def program_lines(programs: dict[str, list[OperationRow]]) -> Iterator[str]:
    """A table of 80 columns for each pass."""
    for walk, rows in programs.items():
        head = f"{walk.replace('_', ' '):<16}{'stage':<24}{'in':>3}{'buffers':>9}"
        yield f"{head}{'rows':>8}{'bytes':>8} occupies"
        for row in rows:
            buffers = f"{','.join(map(str, row.reads))}>{row.writes[0]}"
            occupies = row.resource if row.group is None else f"{row.resource} {row.group}"
            yield (
                f"{row.number:>2} {row.operation:<13}{row.stage:<24}{row.chunk:>3}{buffers:>9}"
                f"{row.rows:>8.0f}{size_text(row.bytes):>8} {occupies}"
            )
        yield ""
    yield "in: number of the chunk. buffers: read > written; 0 is the input of the pass."
    yield "rows and bytes: written by the first rank."


def _row(bound: BoundProgram, operation: Operation) -> OperationRow:
    written = bound.program.buffers[operation.writes[0]]
    # Of the whole output, an operation writes its chunk's rows.
    rows = written.copies * bound.bound.rows_at[written.boundary][operation.chunk]
    row_bytes = sum(bound.message_bytes(written))
    return OperationRow(
        number=operation.number,
        operation=operation.kind,
        stage=operation.stage,
        chunk=operation.chunk,
        reads=operation.reads,
        writes=operation.writes,
        rows=rows if row_bytes else 0.0,
        bytes=row_bytes * rows,
        resource=operation.resource,
        group=operation.group if operation.is_collective else None,
    )
