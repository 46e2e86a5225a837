"""`monta bench --trace`: runs of 4 CPU ranks, and their traces."""

from itertools import pairwise
from pathlib import Path

import pytest
from forked_ranks import LIMIT_S, ForkedRanks

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import PASSES
from monta_megatron.core import Layout, Shape
from monta_megatron.planner.price import bind_expected, lower_expected
from monta_megatron.planner.routing import UniformRouting
from monta_megatron.tools.trace import STOCK, Span, Trace

NUM_RANKS, NUM_CHUNKS = 4, 3
ROWS = [
    STOCK,
    "stock allgather",
    *(f"{name} in 3 chunks" for name in ("alltoall_allgather", "hierarchical_allgather")),
]
LAYER = (
    "--experts 8 --top-k 2 --hidden 32 --tokens 96 --tp 2 --ranks-per-node 2 --repeats 1 "
    "--num-chunks 3 --chains alltoall_allgather,hierarchical_allgather"
)
ALL_PASSES = PASSES["forward_backward"]
pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture(scope="module")
def path(ranks: ForkedRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a run."""
    path = tmp_path_factory.mktemp("recorded") / "trace.json"
    command = f"-m monta_megatron bench --trace {path} {LAYER}"
    result = ranks.run(*command.split())
    assert result.returncode == 0, result.stderr
    return path


@pytest.fixture(scope="module")
def rows(path: Path) -> dict[str, list[Span]]:
    return Trace.load(path).rows


def passes_of(row: list[Span]) -> dict[tuple[int, str], Span]:
    """(rank, pass) -> the span of the whole pass."""
    return {(s.rank, s.pass_name): s for s in row if s.resource == "pass"}


def test_each_row_has_all_passes_on_all_ranks(path: Path) -> None:
    trace = Trace.load(path)
    assert trace.title.startswith("recorded on 4 CPU ranks of 2 nodes: TP 2, EP 2, ETP 2, top-2 of")
    assert trace.about["clock"] == "the monotonic clock of one host"
    assert trace.ranks == tuple(f"rank {rank} (node {rank // 2})" for rank in range(NUM_RANKS))
    assert list(trace.rows) == ROWS
    every_pass = {(rank, pass_.name) for rank in range(NUM_RANKS) for pass_ in ALL_PASSES}
    for row in trace.rows.values():
        assert passes_of(row).keys() == every_pass
        assert {(s.rank, s.pass_name) for s in row if s.resource != "pass"} == every_pass
    assert min(span.start_us for span in trace.spans) == 0


def test_spans_lie_inside_their_passes_and_all_ranks_are_in_a_pass_at_once(
    rows: dict[str, list[Span]],
) -> None:
    """An exchange ends on no rank before it has begun on all: clocks that differ would show."""
    for row in rows.values():
        passes = passes_of(row)
        for span in row:
            whole = passes[span.rank, span.pass_name]
            assert whole.start_us <= span.start_us <= span.end_us <= whole.end_us
        for pass_ in ALL_PASSES:
            same = [passes[rank, pass_.name] for rank in range(NUM_RANKS)]
            assert max(span.start_us for span in same) < min(span.end_us for span in same)


@pytest.mark.parametrize("name", ["alltoall_allgather", "hierarchical_allgather"])
def test_every_operation_is_there_on_every_rank(rows: dict[str, list[Span]], name: str) -> None:
    shape = Shape(
        layout=Layout(ep=2, etp=2, num_local_experts=4, rank=0, nodes=(0, 0, 1, 1)),
        hidden_size=32,
        value_bytes=4,
        prob_bytes=4,
        routing=UniformRouting(num_experts=8, topk=2),
        tokens_per_rank=96,
    )
    bound = bind_expected(shape, CHAINS[name], NUM_CHUNKS, shape.layout)
    expected = sorted(
        (pass_.name, operation.number, operation.stage, operation.chunk, operation.resource)
        for pass_ in ALL_PASSES
        for operation in lower_expected(shape, bound, pass_, "host").program.operations
    )
    for rank in range(NUM_RANKS):
        recorded = sorted(
            (span.pass_name, span.operation, span.stage, span.chunk, span.resource)
            for span in rows[f"{name} in 3 chunks"]
            if span.rank == rank and span.resource != "pass"
        )
        assert recorded == expected


def test_stock_is_recorded_as_it_runs(rows: dict[str, list[Span]]) -> None:
    for rank in range(NUM_RANKS):
        spans = [s for s in rows[STOCK] if s.rank == rank and s.resource != "pass"]
        spans.sort(key=lambda span: (span.start_us, span.end_us))
        links = [(s.stage, s.resource, s.pass_name) for s in spans if s.resource != "memory"]
        # Rows and probabilities, over the network and to the other rank of the experts.
        assert links.count(("alltoall", "inter", "dispatch")) == 2
        assert links.count(("allgather", "intra", "dispatch")) == 2
        assert ("reduce_scatter", "intra", "combine") in links
        assert links[-1] == ("alltoall", "inter", "dispatch_backward")
        # One after the other, without gaps.
        for span, following in pairwise(spans):
            if span.pass_name == following.pass_name:
                assert span.end_us == following.start_us


def test_ranks_of_several_hosts_are_put_on_the_first_ones_clock(
    ranks: ForkedRanks, tmp_path: Path
) -> None:
    script = str(Path(__file__).with_name("record_with_other_clocks.py"))
    layer = f"{LAYER} --phase forward --stock alltoall"
    result = ranks.run(script, "--trace", str(tmp_path / "trace.json"), *layer.split())
    assert result.returncode == 0, result.stderr
    trace = Trace.load(tmp_path / "trace.json")
    assert trace.about["clock"] == "monotonic clocks compared after 31 barriers"
    # The clocks are 1,000 s apart, and a run is ended long before it takes half of that.
    assert LIMIT_S < 500
    assert 0 < trace.about["clock_error_us"] < 500e6
    assert all(0 <= span.start_us <= span.end_us < 500e6 for span in trace.spans)
