"""The executor: runs the program of a pass. It decides nothing; see `chains.lower`."""

from collections.abc import Iterable

from monta_megatron.chains.program import Operation, Pass
from monta_megatron.exchange import operations
from monta_megatron.exchange.monitor import NOTHING
from monta_megatron.exchange.payload import Columns
from monta_megatron.exchange.state import Exchange, State


def run(exchange: Exchange, pass_: Pass, columns: Columns) -> Columns:
    """Apply the chain, or its transpose, to all rows.

    Args:
        exchange: what moves.
        pass_: the pass.
        columns: contiguous, on the source side, or on the experts' side for a transpose.

    Returns:
        The columns on the other side, without ids. They share no memory with the input unless no
        stage of the chain moves anything (every group has one rank, one chunk, one local expert).

    Raises:
        ExchangeError: a collective failed or timed out.
    """
    with exchange.monitor.timed_pass(columns.rows.device, pass_.name):
        state = State(exchange, pass_, columns)
        program = state.bound.program
        state.streams.fork(program.num_streams)
        issue(state, program.operations)
        return _end(state)


def start(state: State) -> None:
    """Begin a pass, whose caller goes on; its first collective is under way then."""
    state.reserve()
    program = state.bound.program
    state.streams.fork(program.num_streams)
    issue(state, program.operations[: program.num_at_start])


def go_on(state: State) -> None:
    """Issue what is left of a pass that was begun."""
    issue(state, state.bound.program.operations[state.num_issued :])


def finish(state: State) -> Columns:
    """End a pass that was begun, and return what `run` does."""
    go_on(state)
    return _end(state)


def issue(state: State, issued: Iterable[Operation]) -> None:
    """Issue operations of a pass; the caller's stream is the current one before and after."""
    streams, monitor = state.streams, state.exchange.monitor
    is_named = monitor.names_operations()
    chain = state.bound.bound.chain.name
    kinds = operations.OPERATIONS
    if state.exchange.fused:
        from monta_megatron.exchange.fused_operations import FUSED_OPERATIONS as kinds
    try:
        for operation in issued:
            streams.enter(operation.stream)
            with monitor.range(state.pass_name, chain, operation) if is_named else NOTHING:
                state.wait(operation.waits)
                state.issued(operation, kinds[operation.kind](state, operation))
    finally:
        streams.leave()


def _end(state: State) -> Columns:
    program = state.bound.program
    state.wait(program.waits_at_end)
    state.streams.join()
    return state.columns(program.output)
