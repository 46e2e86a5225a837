"""The executor: runs the program of a pass. It decides nothing; see `chains.lower`."""

from monta_megatron.chains.program import Pass
from monta_megatron.exchange.operations import OPERATIONS
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
    with exchange.monitor.timed_pass(columns.rows.device):
        return _run(State(exchange, pass_, columns))


def _run(state: State) -> Columns:
    program, streams, monitor = state.bound.program, state.streams, state.exchange.monitor
    streams.fork(program.num_streams)
    for operation in program.operations:
        with (
            streams.on(operation.stream),
            monitor.range(state.pass_name, state.exchange.bound.chain.name, operation),
        ):
            state.wait(operation.waits)
            state.issued(operation, OPERATIONS[operation.kind](state, operation))
    if program.waits_at_end:
        with streams.on(program.num_streams - 1):
            state.wait(program.waits_at_end)
    streams.join()
    return state.columns(program.output)
